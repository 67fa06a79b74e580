"""What the target of an evaluation is: a run, a Hugging Face folder, a model by name, or an address."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from launch.config import TrainConfig

NAMED_MODELS = ("tiny", "smollm2")
"""Models that are made or fetched here: values of model.path that are no folders."""


def is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def address_problem(target: str) -> str:
    """What is wrong with an address; empty where nothing is."""
    try:
        parts = urlsplit(target)
        known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if known and not parts.query and not parts.fragment:
        return ""
    return f"TARGET: found {target!r}, allowed: http://HOST:PORT/v1 (eval.api_model=NAME chooses the model)"


def is_named_model(target: str) -> bool:
    """A folder of that name goes first."""
    return target in NAMED_MODELS and not Path(target).is_dir()


def result_file(config: TrainConfig, target: str) -> Path:
    """Where the evaluation of `target` is written: into its folder, or beside the runs where it has none."""
    if not is_address(target) and not is_named_model(target):
        return Path(target) / "evaluation.json"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", target.partition("://")[2] or target).strip("-")
    return Path(config.run.dir) / f"evaluation-{name}.json"
