"""A weight update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    """Name in the Hugging Face checkpoint layout."""
    shape: tuple[int, ...]
    dtype: str
    """torch name without the prefix: float32, bfloat16."""
    owner: int
    """Global trainer rank that sends the tensor."""
    bucket: int
    digest: str
    """xxh3-128 of the tensor's bytes, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """What a complete weight update of one version consists of. An engine switches only when every
    tensor has arrived with its digest."""

    version: int
    tensors: tuple[TensorEntry, ...]

    @property
    def buckets(self) -> int:
        return 1 + max((entry.bucket for entry in self.tensors), default=-1)

    def in_bucket(self, index: int) -> tuple[TensorEntry, ...]:
        return tuple(entry for entry in self.tensors if entry.bucket == index)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightExport:
    """A manifest with one opaque handle per bucket (an object-store reference, a collective, ...)."""

    manifest: WeightManifest
    buckets: Sequence[Any]
