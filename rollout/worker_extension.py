"""The receiving half of a weight update, mixed into vLLM's worker by `worker_extension_cls`.

Rules:
- A bucket is staged, never loaded, until every tensor of the manifest has arrived exactly once with its
  shape, dtype and digest. Whatever goes wrong before that leaves the serving weights untouched.
- A loader that fails half-way has already overwritten layers. On CPU the worker therefore keeps the last
  committed payload and loads it again; elsewhere (no room for a second copy) it reports that it could not,
  and the engine stops answering rather than serve a mixture.
- Faults come back as text: an exception in a vLLM worker would arrive as an anonymous RPC failure.

vLLM and torch are imported where they are used, so that the staging is tested without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_agent.contracts import TensorEntry, WeightManifest
from megatron_agent.digests import digest
from rollout.buckets import Arrays, Layout, map_bucket

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
"""How a torch dtype travels: numpy has no bfloat16, its bits come as uint16."""
NAMED_FAULTS = 8
"""Faults that an error message spells out."""


def encode_manifest(manifest: WeightManifest) -> str:
    return json.dumps(asdict(manifest))


def decode_manifest(text: str) -> WeightManifest:
    fields = json.loads(text)
    tensors = (TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["tensors"])
    return WeightManifest(version=fields["version"], tensors=tuple(tensors))


def summarise(faults: Sequence[str]) -> str:
    """The first faults in one line."""
    more = len(faults) - NAMED_FAULTS
    return "; ".join(faults[:NAMED_FAULTS]) + (f"; and {more} more" if more > 0 else "")


class WeightStaging:
    """The tensors of one update while they arrive."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._faults: list[str] = []
        if len(self._entries) != len(manifest.tensors):
            self._faults.append("the manifest names a tensor twice")

    def add(self, index: int, arrays: Arrays) -> list[str]:
        """Stage bucket `index`; returns what is wrong with it (empty: nothing)."""
        faults = [
            f"{name}: {fault}" for name, array in arrays.items() if (fault := self._fault(index, name, array))
        ]
        self._arrays.update((name, array) for name, array in arrays.items() if name in self._entries)
        self._faults += faults
        return faults

    def faults(self) -> list[str]:
        """Everything that forbids a commit."""
        missing = [f"{name}: missing" for name in self._entries if name not in self._arrays]
        return self._faults + missing

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor in the manifest's order, which keeps the tensors of a layer together."""
        import torch

        for name, entry in self._entries.items():
            tensor = torch.from_numpy(self._arrays[name])
            yield name, tensor.view(torch.bfloat16) if entry.dtype == "bfloat16" else tensor

    def _fault(self, index: int, name: str, array: NDArray[Any]) -> str:
        entry = self._entries.get(name)
        if entry is None:
            return "not in the manifest"
        if entry.bucket != index:
            return f"came in bucket {index}, belongs to bucket {entry.bucket}"
        if name in self._arrays:
            return "arrived twice"
        if array.shape != entry.shape:
            return f"shape {array.shape}, the manifest says {entry.shape}"
        if array.dtype != np.dtype(NUMPY_DTYPES.get(entry.dtype, entry.dtype)):
            return f"dtype {array.dtype}, the manifest says {entry.dtype}"
        if digest(array) != entry.digest:
            return "digest differs, the bytes are corrupt"
        return ""


class WorkerExtension:
    """Methods that `AsyncLLM.collective_rpc` reaches by name in every worker process."""

    staging: WeightStaging | None = None
    committed: WeightStaging | None = None
    """Last committed payload, kept where a failed load can be undone with it."""

    model_runner: Any
    vllm_config: Any

    def begin_staging(self, manifest: str) -> None:
        self.staging = WeightStaging(decode_manifest(manifest))

    def stage_bucket(self, version: int, index: int, path: str, layout: Layout) -> list[str]:
        """Map and check one bucket; returns its faults."""
        if self.staging is None or self.staging.manifest.version != version:
            return [f"no update of version {version} was begun"]
        return self.staging.add(index, map_bucket(path, layout))

    def staging_faults(self) -> list[str]:
        return ["no update was begun"] if self.staging is None else self.staging.faults()

    def drop_staging(self) -> None:
        self.staging = None

    def load_staging(self) -> tuple[str, bool]:
        """Switch to the staged weights. Returns a fault (empty: none) and whether the weights that now
        serve are those of one version."""
        if self.staging is None:
            return "no update was begun", True
        staging, self.staging = self.staging, None
        fault = self._load_payload(staging)
        if not fault:
            self.committed = staging if self._keeps_payload() else None
            return "", True
        restored = self.committed is not None and not self._load_payload(self.committed)
        return fault, restored

    def refresh_tied_head(self) -> None:
        """Give a tied output head the embedding that was just loaded (CPU; elsewhere they are one tensor)."""
        config = self.vllm_config.model_config.hf_text_config
        if self._keeps_payload() and getattr(config, "tie_word_embeddings", False):
            pack_tied_head(self.model_runner.get_model())

    def _keeps_payload(self) -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def _load_payload(self, staging: WeightStaging) -> str:
        from vllm.config import set_current_vllm_config

        try:
            with set_current_vllm_config(self.vllm_config):
                missing = load_checkpoint_tensors(self.model_runner, self.vllm_config, staging.tensors)
                self.refresh_tied_head()
        except Exception as error:
            return f"loading failed: {type(error).__name__}: {error}"
        return f"the model needs tensors that the manifest lacks: {', '.join(missing)}" if missing else ""


def load_checkpoint_tensors(
    model_runner: Any, vllm_config: Any, tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
) -> list[str]:
    """Load tensors in the Hugging Face layout over the serving ones; returns what was left without a value.

    The same phases as vLLM's own `reload_weights`, which only warns about a parameter that nothing was loaded
    into, and takes a fused one of which a part is missing for padded.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = model_runner.get_model()
    needed = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(tensors())
        partial = partly_loaded(model)
    finally:
        # Also after an exception: a layer left half-way would count what it got into the next load.
        finalize_layerwise_reload(model, vllm_config.model_config)
    if vllm_config.model_config.quantization is not None:
        return []
    return partial + sorted(needed - loaded if loaded is not None else ())


def partly_loaded(model: Any) -> list[str]:
    """Linear layers of which only a part has arrived (a fused gate without its up projection). Embeddings are
    left out: theirs may be padded."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LinearBase)]
    infos = [(name, get_layerwise_info(layer)) for name, layer in layers]
    return [f"part of {name}" for name, info in infos if info.can_load() and info.load_numel > 0]


def pack_tied_head(model: Any) -> None:
    """On CPU a linear layer keeps a packed copy of its weight. vLLM refreshes the embedding's parameter and
    leaves the head's packed copy at the old version, without an error: pack it again."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.weight = model.model.embed_tokens.weight
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
