"""README.md of an exported model: what a reader needs to judge it, read from the run's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_agent
from megatron_agent.tracking.jsonl import read_metrics

GREEDY, SAMPLED = "eval/greedy/", "eval/sampled/"
SETTINGS = (
    "model.dtype",
    "mesh.tp",
    "mesh.pp",
    "mesh.dp",
    "algorithm.advantage",
    "algorithm.loss",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.weighting",
    "algorithm.updates_per_step",
    "schedule.groups_per_step",
    "schedule.attempts_per_group",
    "optimizer.learning_rate",
    "rollout.temperature",
    "rollout.max_turns",
    "rollout.max_context_tokens",
    "cold_start.steps",
    "cold_start.habit",
    "run.seed",
    "run.deterministic",
)
"""What matters for the figures."""


@dataclass(frozen=True)
class Facts:
    """What the card tells."""

    name: str
    checkpoint: str
    """Name of the checkpoint's folder: phase and step."""
    step: int
    config: Mapping[str, Any]
    evaluations: Sequence[Mapping[str, float]]
    """The rows of the run's metrics that hold a held-out evaluation, in the order of their steps."""

    def setting(self, key: str) -> Any:
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_facts(run: Path, checkpoint: Path, step: int, config: Mapping[str, Any]) -> Facts:
    """The facts of `checkpoint`, which is that of `step`, in the folder of a run."""
    metrics = run / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    evaluated = [row for row in rows if f"{GREEDY}success" in row and row["step"] <= step]
    return Facts(run.resolve().name, checkpoint.name, step, config, evaluated)


def model_card(facts: Facts) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    parts = [
        _front_matter(facts),
        f"# {facts.name}",
        _summary(facts),
        _results(facts),
        _settings(facts),
        _use(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(facts: Facts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if str(facts.setting("model.path")) == "smollm2":
        lines += ["license: apache-2.0", "base_model: HuggingFaceTB/SmolLM2-135M-Instruct"]
    lines += ["tags:", "- megatron-agent", "- reinforcement-learning", "- tool-use"]
    return "\n".join(["---", *lines, "---"])


def _summary(facts: Facts) -> str:
    updates = "supervised only" if facts.checkpoint.startswith("cold_start") else f"{facts.step} steps"
    rows = [
        ("base model", facts.setting("model.path")),
        ("recipe", facts.setting("recipe")),
        ("task", facts.setting("env.name")),
        ("cold start", f"{facts.setting('cold_start.steps') or 0} supervised steps"),
        ("reinforcement learning", updates),
        ("checkpoint", facts.checkpoint),
        ("trained with", f"megatron-agent {megatron_agent.__version__}"),
    ]
    return _table(("", ""), rows)


def _results(facts: Facts) -> str:
    """The last evaluation up to the checkpoint beside the first one, which is that of the start policy."""
    if not facts.evaluations:
        return "## Held-out results\n\nThe run holds no evaluation up to this checkpoint."
    first, last = facts.evaluations[0], facts.evaluations[-1]
    compared = first is not last
    rows: list[tuple[str, ...]] = []
    for prefix, kind in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
        for name in _names(last, prefix):
            label = f"{kind}, {name.replace('_', ' ').replace('/', ', ')}"
            shown = (first, last) if compared else (last,)
            rows.append((label, *(_figure(row, prefix + name) for row in shown)))
    header = ["", *([f"step {first['step']:.0f}"] if compared else []), f"step {last['step']:.0f}"]
    missing = f" The checkpoint itself, step {facts.step}, was not evaluated."
    note = missing if last["step"] != facts.step else ""
    return (
        "## Held-out results\n\nShare of samples solved, with 95 % intervals; `step 0` is the policy before "
        f"reinforcement learning.{note}\n\n{_table(header, rows)}"
    )


def _names(row: Mapping[str, float], prefix: str) -> Iterator[str]:
    """The figures of an evaluation that have an interval: the overall ones first, success before pass@k."""
    names = [key.removeprefix(prefix) for key in row if key.startswith(prefix) and f"{key}_low" in row]

    def place(name: str) -> tuple[bool, str, bool, str]:
        part, _, figure = name.rpartition("/")
        return bool(part), part, figure != "success", figure

    return iter(sorted(names, key=place))


def _figure(row: Mapping[str, float], key: str) -> str:
    if key not in row:
        return "-"
    return f"{row[key]:.3f} [{row[f'{key}_low']:.3f}, {row[f'{key}_high']:.3f}]"


def _settings(facts: Facts) -> str:
    found = {key: facts.setting(key) for key in SETTINGS}
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in found.items()}
    rows = [(f"`{key}`", value) for key, value in shown.items() if value is not None]
    return f"## Settings\n\n{_table(('setting', 'value'), rows)}"


def _use() -> str:
    return (
        "## Use\n\nThe chat template renders tools and reads calls in the hermes form "
        "(`<tool_call>{...}</tool_call>`).\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH")\n```'
    )


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
