"""Staging of buckets without an engine: files, manifests, faults."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_agent.contracts import TensorEntry, WeightManifest
from megatron_agent.digests import digest
from megatron_agent.settings import RolloutSettings
from rollout.buckets import bucket_file, map_bucket
from rollout.engine import engine_environment
from rollout.worker_extension import WeightStaging, decode_manifest, encode_manifest, summarise

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.uint16, np.float16, np.int64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@settings(max_examples=40, deadline=None)
@given(arrays=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4))
def test_a_bucket_file_gives_back_what_was_written(arrays: dict[str, np.ndarray]) -> None:
    with bucket_file(arrays) as (path, layout):
        mapped = map_bucket(path, layout)
    assert not os.path.exists(path)
    assert list(mapped) == list(arrays)
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        assert mapped[name].shape == array.shape
        assert mapped[name].tobytes() == array.tobytes(), "the mapping outlives the file"


def test_a_read_only_strided_payload_is_written_in_c_order() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    array.flags.writeable = False
    with bucket_file({"a": array}) as (path, layout):
        np.testing.assert_array_equal(map_bucket(path, layout)["a"], array)


def entry(name: str, array: np.ndarray, bucket: int = 0, dtype: str = "float32") -> TensorEntry:
    return TensorEntry(
        name=name, shape=array.shape, dtype=dtype, owner=0, bucket=bucket, digest=digest(array)
    )


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(4, dtype=np.float32)
MANIFEST = WeightManifest(version=4, tensors=(entry("a", A), entry("b", B, bucket=1)))


def test_a_complete_update_has_no_faults_and_keeps_the_manifests_order() -> None:
    staging = WeightStaging(decode_manifest(encode_manifest(MANIFEST)))
    assert staging.manifest == MANIFEST
    assert staging.faults() == ["a: missing", "b: missing"]
    assert staging.add(1, {"b": B}) == []
    assert staging.add(0, {"a": A}) == []
    assert staging.faults() == []
    assert [name for name, _ in staging.tensors()] == ["a", "b"]


def test_bfloat16_travels_as_its_bits() -> None:
    tensor = torch.tensor([1.5, -2.0, 3.25]).bfloat16()
    bits = tensor.view(torch.uint16).numpy()
    staging = WeightStaging(WeightManifest(version=1, tensors=(entry("t", bits, dtype="bfloat16"),)))
    assert staging.add(0, {"t": bits}) == []
    ((_, received),) = staging.tensors()
    assert received.dtype == torch.bfloat16
    assert torch.equal(received, tensor)


@pytest.mark.parametrize(
    ("index", "arrays", "fault"),
    [
        (0, {"c": A}, "c: not in the manifest"),
        (1, {"a": A}, "a: came in bucket 1, belongs to bucket 0"),
        (0, {"a": A.T.copy()}, "a: shape (3, 2), the manifest says (2, 3)"),
        (0, {"a": A.astype(np.float16)}, "a: dtype float16, the manifest says float32"),
        (0, {"a": A + 1}, "a: digest differs, the bytes are corrupt"),
    ],
)
def test_faults_are_named_and_forbid_a_commit(index: int, arrays: dict, fault: str) -> None:
    staging = WeightStaging(MANIFEST)
    assert staging.add(index, arrays) == [fault]
    assert fault in staging.faults()


def test_a_tensor_that_arrives_twice_is_a_fault() -> None:
    staging = WeightStaging(MANIFEST)
    assert staging.add(0, {"a": A}) == []
    assert staging.add(0, {"a": A}) == ["a: arrived twice"]
    twice = replace(MANIFEST, tensors=(*MANIFEST.tensors, MANIFEST.tensors[0]))
    assert "the manifest names a tensor twice" in WeightStaging(twice).faults()


def test_many_faults_are_summarised() -> None:
    assert summarise(["a", "b"]) == "a; b"
    assert summarise([str(i) for i in range(20)]).endswith("; 7; and 12 more")


@pytest.mark.parametrize(
    ("cores", "threads", "index", "bound"),
    [
        ("auto", 2, 0, "0,1"),
        ("auto", 2, 1, "2,3"),
        ("auto", 3, 1, "0,1,3"),
        ("0-1", 2, 5, "0-1"),
        ("0|1", 1, 1, "1"),
        ("auto", 1, 0, None),
    ],
)
def test_engines_are_dealt_cores(cores: str, threads: int, index: int, bound: str | None) -> None:
    settings_ = RolloutSettings(engine_cores=cores, engine_threads=threads)
    environment = engine_environment(settings_, index, range(4))
    assert environment.get("VLLM_CPU_OMP_THREADS_BIND") == bound
    assert environment["OMP_NUM_THREADS"] == str(threads)
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in environment) == (bound is None)
