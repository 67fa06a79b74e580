"""Each patch of the CPU stand-in is needed: without it, one training step fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

NEEDED = {
    "_patch_device_calls": "not compiled with CUDA",
    "_patch_factories": "not compiled with CUDA",
    "_patch_type_names": "torch.cuda.FloatTensor",
    "_patch_rng": "not compiled with CUDA",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run without each patch printed; all runs at once, since each mostly imports."""
    root = tmp_path_factory.mktemp("stand_in")
    model = harness.write_model(root / "model", "qwen2")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    script = str(harness.HERE / "stand_in_run.py")
    runs = {
        name: subprocess.Popen(
            [sys.executable, script, name, str(model), str(Path(root) / name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        for name in NEEDED
    }
    try:
        return {name: run.communicate(timeout=120)[0] for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()


@pytest.mark.parametrize("patch", NEEDED)
def test_training_fails_without_the_patch(outputs: Any, patch: str) -> None:
    assert NEEDED[patch] in outputs[patch]
