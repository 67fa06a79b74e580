"""Tool calls in the text that a model wrote.

One rule: an emission is understood completely or not at all. Whatever is malformed becomes
`Parse.ERROR` with one reason that can be told to the agent, and then no call of that emission is
returned: no argument is invented or repaired, and no part of a set of calls is executed.

Hermes form, any number of calls in one action, free text around them:

    <tool_call>
    {"name": "lookup", "arguments": {"key": "kiwi"}}
    </tool_call>

- JSON is read strictly: no duplicate keys, no NaN or infinity, no control or unpaired surrogate
  characters, at most `MAX_DEPTH` levels, exactly the keys `name` and `arguments`.
- `arguments` is an object. A string that encodes an object (as the OpenAI API writes it) is accepted and
  read with the same strictness: the object is the agent's own, only quoted.
- The JSON itself decides where a call ends, so that a string argument may contain `</tool_call>`.
- Thought is no action: what `<think>...</think>` encloses is neither call nor content. A `</think>` that
  nothing opened closes a thought that the generation prompt began.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_agent.contracts import Parse, ToolCall
from megatron_agent.registry import Registry

MAX_DEPTH = 64
"""Levels of nesting in one call; a fixed limit, because the interpreter's depends on the caller's stack."""

_TOO_DEEP = f"the tool call is nested deeper than {MAX_DEPTH} levels"

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"<\s?(?P<slash>/?)\s?(?P<name>think|tool[_\- ]?calls?)\s?/?>", re.IGNORECASE)
_SPACE = " \t\n\r"
"""White space of JSON; Python's own `strip` would take more."""
_SPACES = re.compile(f"[{_SPACE}]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """What a parser found in an action."""

    content: str
    """The text outside thought and tool calls, stripped; after an error, what came before it."""
    tool_calls: tuple[ToolCall, ...] = ()
    parse: Parse = Parse.NONE
    parse_error: str = ""
    """Reason, where `parse` is `error`; then there are no tool calls."""


PARSERS: Registry[Callable[[str], ParsedAction]] = Registry("tool-call format")
"""Format name -> parser that never raises."""


def parse_tool_calls(text: str, format: str = "hermes") -> ParsedAction:
    """Read the tool calls of `text`. Never raises for any text.

    Raises UnknownName, with the known ones, for a `format` that nothing is registered under.
    """
    return PARSERS.get(format)(text)


class Malformed(ValueError):
    """Why an emission is not a set of tool calls: one clear line."""


# ---------------------------------------- hermes


@PARSERS.register("hermes")
def parse_hermes(text: str) -> ParsedAction:
    """Parser of the hermes form; see the module's docstring."""
    start = 0
    while True:
        scan = _Scan(text, start)
        try:
            resume = scan.run()
        except Malformed as error:
            thought_end = _stray_think_end(text, start)
            if thought_end is None:
                return ParsedAction(content=scan.content, parse=Parse.ERROR, parse_error=str(error))
            resume = thought_end
        if resume is None:
            parse = Parse.OK if scan.calls else Parse.NONE
            return ParsedAction(content=scan.content, tool_calls=tuple(scan.calls), parse=parse)
        start = resume


class _Scan:
    """One pass over `text[start:]`: collects calls and the text between them."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.position = start
        self.calls: list[ToolCall] = []
        self._content: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content).strip()

    def run(self) -> int | None:
        """None at the end of the text; a position where a thought that nothing opened ends there.
        Raises Malformed."""
        while tag := _TAG.search(self.text, self.position):
            self._content.append(self.text[self.position : tag.start()])
            self.position = tag.end()
            if tag["name"].lower() == "think":
                if tag["slash"]:
                    return tag.end()
                self._skip_thought()
            elif tag[0] == OPEN:
                self._read_call()
            elif tag[0] == CLOSE:
                raise Malformed(f"{CLOSE} without {OPEN}")
            else:
                raise Malformed(f"wrong tag {tag[0]}: write {CLOSE if tag['slash'] else OPEN}")
        self._content.append(self.text[self.position :])
        return None

    def _skip_thought(self) -> None:
        for tag in _TAG.finditer(self.text, self.position):
            if tag["slash"] and tag["name"].lower() == "think":
                self.position = tag.end()
                return
        raise Malformed("<think> is not closed")

    def _read_call(self) -> None:
        start = _skip_space(self.text, self.position)
        try:
            value, end = _DECODER.raw_decode(self.text, start)
        except (json.JSONDecodeError, RecursionError):
            raise Malformed(_diagnose(self._payload())) from None
        except Malformed:
            raise
        except ValueError:  # the interpreter's limit on the digits of an integer
            raise Malformed("a number in the tool call is too long") from None
        self.position = self._expect_close(_skip_space(self.text, end))
        self.calls.append(_read_object(value))

    def _payload(self) -> str:
        """What stands in the tag that was just opened, up to the next tag of a call."""
        tags = (tag for tag in _TAG.finditer(self.text, self.position) if tag["name"].lower() != "think")
        tag = next(tags, None)
        return self.text[self.position : tag.start() if tag else len(self.text)]

    def _expect_close(self, position: int) -> int:
        rest = self.text[position:]
        if rest.startswith(CLOSE):
            return position + len(CLOSE)
        if not rest:
            raise Malformed(f"{OPEN} is not closed")
        tag = _TAG.match(rest)
        if tag and tag[0] == OPEN:
            raise Malformed(f"{OPEN} inside {OPEN}")
        if tag and tag["name"].lower() != "think":
            raise Malformed(f"wrong tag {tag[0]}: write {CLOSE}")
        if rest[0] in "{[":
            raise Malformed("more than one JSON value in one tool call")
        if rest[0] in "}]":
            raise Malformed(f"unbalanced {rest[0]} after the JSON object")
        raise Malformed("text after the JSON object of a tool call")


def _stray_think_end(text: str, start: int) -> int | None:
    """End of the first `</think>` after `start` that no `<think>` opened."""
    for tag in _TAG.finditer(text, start):
        if tag["name"].lower() == "think":
            return tag.end() if tag["slash"] else None
    return None


def _skip_space(text: str, position: int) -> int:
    space = _SPACES.match(text, position)
    return space.end() if space else position


# ---------------------------------------- strict JSON


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise Malformed("duplicate key in a JSON object")
    return result


def _no_constant(literal: str) -> NoReturn:
    raise Malformed(f"{literal} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Malformed("a number in the tool call is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
)


def _read_object(value: Any) -> ToolCall:
    """Turn the JSON value of a tag into a call. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed(f"a tool call must be a JSON object, not {_kind(value)}")
    _check_text(value)
    for key in ("name", "arguments"):
        if key not in value:
            raise Malformed(f"the tool call has no {key!r}")
    unexpected = sorted(value.keys() - {"name", "arguments"})
    if unexpected:
        raise Malformed(f"unexpected key {unexpected[0]!r} in the tool call")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str):
        raise Malformed(f"'name' must be a string, not {_kind(name)}")
    if not name.strip():
        raise Malformed("'name' is empty")
    if isinstance(arguments, str):
        arguments = _read_encoded(arguments)
    if not isinstance(arguments, dict):
        raise Malformed(f"'arguments' must be an object, not {_kind(arguments)}")
    return ToolCall(name=name, arguments=arguments)


def _read_encoded(text: str) -> Any:
    """Read `arguments` that were given as a string. Raises Malformed."""
    start = _skip_space(text, 0)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except Malformed as error:
        raise Malformed(f"'arguments' as a string: {error}") from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except ValueError:
        raise Malformed("'arguments' is a string that does not encode an object") from None
    if _skip_space(text, end) != len(text) or not isinstance(value, dict):
        raise Malformed("'arguments' is a string that does not encode an object")
    _check_text(value)
    return value


def _check_text(value: Any) -> None:
    """Raises Malformed where `value` is nested too deeply or holds text that UTF-8 cannot encode."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            break
        level = [
            child for item in containers for child in (item.values() if isinstance(item, dict) else item)
        ]
    else:
        raise Malformed(_TOO_DEEP)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("unpaired surrogate in a string of the tool call") from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")


# ---------------------------------------- reasons


def _diagnose(payload: str) -> str:
    """Why `payload`, the inside of a tag, is not JSON."""
    body = payload.strip(_SPACE)
    if not body:
        return "empty tool call"
    if body.startswith("\ufeff"):
        return "byte order mark before the JSON of a tool call"
    if body.startswith("```"):
        return "code fence in a tool call: write the JSON alone"
    try:
        _DECODER.raw_decode(body)
    except json.JSONDecodeError as error:
        return _diagnose_at(body, error)
    except RecursionError:
        return _TOO_DEEP
    except ValueError as error:
        return str(error) if isinstance(error, Malformed) else "a number in the tool call is too long"
    return "invalid JSON in a tool call"


def _diagnose_at(body: str, error: json.JSONDecodeError) -> str:
    position = _skip_space(body, error.pos)
    rest = body[position:]
    before = body[:position].rstrip(_SPACE)
    if error.msg.startswith("Invalid control character"):
        return "control character in a string: escape it"
    if not rest or error.msg.startswith("Unterminated string"):
        return "the JSON of a tool call ends too early"
    if rest[0] in "}]" and before.endswith(","):
        return "trailing comma in a tool call"
    if rest[0] == "," and rest[1:].lstrip(_SPACE).startswith(("}", "]")):
        return "trailing comma in a tool call"
    if rest[0] == "'":
        return "single quotes: JSON strings take double quotes"
    if rest.startswith(("//", "/*", "#")):
        return "comment in a tool call: JSON has none"
    literal = re.match(r"(True|False|None)\b", rest)
    if literal:
        return f"{literal[0]} is Python, not JSON: write true, false or null"
    return f"invalid JSON in a tool call at character {position + 1}"
