"""From a row to a Sample, field by field; a row has the fields of Sample, or those of verl and Agent-R1.

- A field that is null is a field that is not there.
- `env_kwargs`, `reward_model` and `extra_info` are objects, or JSON strings of objects. `env_type` in
  `env_kwargs` names the environment where `env_name` does not (Agent-R1).
- `reward_model` may be written short: `env`, or `package.module:function`.
- Without `id`, a row is called `data_source/split/index` with `extra_info.index`, or the row's number.
- Without `split`, it is `extra_info.split`, otherwise `train`; without `task`, `data_source`, `ability` or
  the name of the file.
- A row without an environment is a question and one answer: environment `single_turn`, which leaves the
  reward to the reward model, and flow `single_step` where the row names none, or `single_turn_agent` (verl).
- Other columns go into `extra_info`, where that has no such entry.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron_agent.contracts import Message, Sample
from megatron_agent.data.problems import shown
from megatron_agent.data.tables import Broken, as_object, parse_json

FIELDS = tuple(field.name for field in dataclasses.fields(Sample))
ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
DEFAULT_FLOW = "agent_env_loop"
SINGLE_TURN, SINGLE_STEP = "single_turn", "single_step"
"""Environment and flow of rows without an environment."""
SINGLE_STEP_ELSEWHERE = "single_turn_agent"
"""The name of such a flow in verl."""
FUNCTION = re.compile(r"[\w.]+:\w+")
SEED_LIMIT = 2**63


def sample_of(row: Mapping[str, Any], stem: str, number: int) -> tuple[Sample | None, list[str]]:
    """The sample of a row, or what is wrong with it. `stem` (of the file) and `number` (of the row) name
    what the row does not."""
    reader = _Row(row)
    sample = reader.sample(stem, number)
    return (None, reader.problems) if reader.problems else (sample, [])


class _Row:
    """One row while it is read; `problems` grows."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = {name: value for name, value in row.items() if value is not None}
        self.problems: list[str] = []

    def sample(self, stem: str, number: int) -> Sample:
        self._columns()
        extra_info = self._others() | self._object("extra_info")
        env_name, env_kwargs = self._environment()
        data_source = self._text("data_source")
        split = self._text("split") or _text_in(extra_info, "split") or "train"
        ability = self._text("ability")
        agent_name = self._text("agent_name")
        if not env_name and agent_name in ("", SINGLE_STEP_ELSEWHERE):
            agent_name = SINGLE_STEP
        reward_model = self._reward_model()
        prompt = self._prompt()
        sample = Sample(
            id=self._id() or f"{data_source or stem}/{split}/{extra_info.get('index', number)}",
            task=self._text("task", required=True) or data_source or ability or stem,
            prompt=prompt,
            agent_name=agent_name or DEFAULT_FLOW,
            env_name=env_name or SINGLE_TURN,
            env_kwargs=env_kwargs,
            reward_model=reward_model,
            seed=self._seed(),
            split=split,
            data_source=data_source,
            ability=ability,
            extra_info=extra_info,
        )
        self._completeness(prompt, env_name, env_kwargs, reward_model)
        return sample

    # ------------------------------------ columns

    def _columns(self) -> None:
        """A column that is nearly one of ours, which is missing, is misspelt."""
        for name in self.row.keys() - set(FIELDS):
            near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)
            if near and near[0] not in self.row:
                self.problems.append(f"{name}: found an unknown field, did you mean {near[0]}?")
            elif name in MEDIA and self.row[name]:
                self.problems.append(f"{name}: found media, allowed: text only")

    def _others(self) -> dict[str, Any]:
        others = {name: value for name, value in self.row.items() if name not in (*FIELDS, *MEDIA)}
        self._check_json("", others)
        return others

    # ------------------------------------ fields

    def _text(self, name: str, *, required: bool = False) -> str:
        value: Any = self.row.get(name, "")
        if not isinstance(value, str):
            self.problems.append(f"{name}: found {shown(value)}, allowed: text")
            return ""
        if required and not value and name in self.row:
            self.problems.append(f"{name}: found empty text, allowed: text that is not empty")
        self._check_json(name, value)
        return str(value)

    def _id(self) -> str:
        value = self.row.get("id")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self._text("id", required=True)

    def _seed(self) -> int:
        value = self.row.get("seed", 0)
        if isinstance(value, int) and not isinstance(value, bool) and -SEED_LIMIT <= value < SEED_LIMIT:
            return value
        self.problems.append(f"seed: found {shown(value)}, allowed: a whole number of 64 bits")
        return 0

    def _object(self, name: str) -> dict[str, Any]:
        value = self.row.get(name, {})
        if isinstance(value, str):
            try:
                value = as_object(value)
            except Broken as error:
                self.problems.append(f"{name}: {error} (the text of the field)")
                return {}
        if not isinstance(value, Mapping):
            allowed = "an object, or a JSON string of one"
            self.problems.append(f"{name}: found {shown(value)}, allowed: {allowed}")
            return {}
        self._check_json(name, value)
        return dict(value)

    def _environment(self) -> tuple[str, dict[str, Any]]:
        """Name and arguments of the environment; the name is empty where the row has none."""
        name, kwargs = self._text("env_name"), self._object("env_kwargs")
        if "env_type" not in kwargs:
            return name, kwargs
        kind = kwargs.pop("env_type")
        if not isinstance(kind, str) or not kind:
            self.problems.append(f"env_kwargs.env_type: found {shown(kind)}, allowed: name of an environment")
        elif name not in ("", kind):
            self.problems.append(
                f"env_name: found {name!r}, but env_kwargs.env_type is {kind!r}, allowed: one of them"
            )
        return name or str(kind), kwargs

    def _reward_model(self) -> dict[str, Any] | None:
        value = self.row.get("reward_model")
        if value is None:
            return None
        if value == "env":
            return {"style": "env"}
        if isinstance(value, str) and FUNCTION.fullmatch(value):
            return {"style": "function", "function": value}
        return self._object("reward_model")

    def _completeness(
        self,
        prompt: tuple[Message, ...],
        env_name: str,
        env_kwargs: Mapping[str, Any],
        reward_model: Mapping[str, Any] | None,
    ) -> None:
        """What a row without an environment must have. Said only of rows whose fields are all right."""
        if self.problems or env_name:
            return
        if not prompt:
            self.problems.append(
                "prompt: found neither a prompt nor an environment, allowed: prompt, env_name or both"
            )
        elif env_kwargs:
            self.problems.append(
                f"env_kwargs: found {shown(sorted(env_kwargs))} without an environment, "
                "allowed: with env_name, or env_type in env_kwargs"
            )
        elif reward_model is None or reward_model.get("style") == "env":
            self.problems.append(
                "reward_model: found neither a reward model nor an environment, so that nobody rewards the "
                "answer, allowed: reward_model, env_name or both"
            )

    # ------------------------------------ prompt

    def _prompt(self) -> tuple[Message, ...]:
        value = self.row.get("prompt", [])
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = parse_json(value)
            except Broken as error:
                self.problems.append(f"prompt: {error} (the text of the field)")
                return ()
        if not isinstance(value, (list, tuple)):
            allowed = "a list of messages {role, content}, or a JSON string of one"
            self.problems.append(f"prompt: found {shown(value)}, allowed: {allowed}")
            return ()
        found = [self._message(f"prompt[{index}]", message) for index, message in enumerate(value)]
        return tuple(message for message in found if message is not None)

    def _message(self, where: str, message: Any) -> Message | None:
        if not isinstance(message, Mapping):
            self.problems.append(f"{where}: found {shown(message)}, allowed: a message {{role, content}}")
            return None
        if message.get("role") not in ROLES:
            role = shown(message["role"]) if "role" in message else "none"
            self.problems.append(f"{where}.role: found {role}, allowed: {' | '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            found = shown(content) if "content" in message else "none"
            self.problems.append(f"{where}.content: found {found}, allowed: text")
            return None
        self._check_json(where, message)
        return dict(message)

    # ------------------------------------ values

    def _check_json(self, name: str, value: Any) -> None:
        problem = misfit(name, value)
        if problem:
            self.problems.append(problem)


def misfit(where: str, value: Any) -> str:
    """Why JSON cannot hold the value; empty where it can."""
    if value is None or isinstance(value, (bool, int)):
        return ""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            return f"{where}: found half a surrogate pair in {shown(value)}, allowed: Unicode text"
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{where}: found {value}, allowed: finite numbers"
    if isinstance(value, list):
        return next(filter(None, (misfit(f"{where}[{i}]", entry) for i, entry in enumerate(value))), "")
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if not isinstance(name, str):
                return f"{where}: found the key {shown(name)}, allowed: text"
            problem = misfit(where, name) or misfit(f"{where}.{name}" if where else name, entry)
            if problem:
                return problem
        return ""
    kind = type(value).__name__
    return f"{where}: found a value of type {kind}, allowed: what JSON holds"


def _text_in(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    return value if isinstance(value, str) else ""
