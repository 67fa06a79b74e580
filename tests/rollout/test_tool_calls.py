"""Tool-call parsing: an emission is understood completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agent.contracts import Parse, ToolCall
from megatron_agent.registry import UnknownName
from rollout.tool_calls import MAX_DEPTH, parse_tool_calls

GOOD = '{"name": "lookup", "arguments": {"key": "kiwi"}}'
KIWI = ToolCall(name="lookup", arguments={"key": "kiwi"})


def tag(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


def call(arguments: str, name: str = '"lookup"') -> str:
    return tag(f'{{"name": {name}, "arguments": {arguments}}}')


@dataclass(frozen=True)
class Case:
    id: str
    text: str
    reason: str


MALFORMED = [
    Case("truncated in a string", tag('{"name": "lookup", "arguments": {"key": "ki'), "ends too early"),
    Case("truncated in a string, one line", '<tool_call>{"name": "look</tool_call>', "ends too early"),
    Case("truncated after a colon", '<tool_call>\n{"name": "lookup", "arguments":', "ends too early"),
    Case("a brace too few", tag('{"name": "lookup", "arguments": {"key": "kiwi"}'), "ends too early"),
    Case("a brace too many", tag(GOOD + "}"), "unbalanced }"),
    Case("two objects", tag(GOOD + GOOD), "more than one JSON value"),
    Case("two objects on two lines", tag(GOOD + "\n" + GOOD), "more than one JSON value"),
    Case("object and list", tag(GOOD + "[]"), "more than one JSON value"),
    Case("list of calls", tag(f"[{GOOD}]"), "must be a JSON object, not a list"),
    Case("a string", tag('"lookup"'), "must be a JSON object, not a string"),
    Case("a number", tag("7"), "must be a JSON object, not a number"),
    Case("null", tag("null"), "must be a JSON object, not null"),
    Case("no open tag", GOOD + "\n</tool_call>", "</tool_call> without <tool_call>"),
    Case("no close tag", "<tool_call>\n" + GOOD, "<tool_call> is not closed"),
    Case("open tag instead of close", f"<tool_call>{GOOD}<tool_call>", "inside <tool_call>"),
    Case("nested tag", f"<tool_call>{tag(GOOD)}</tool_call>", "empty tool call"),
    Case("second call not closed", tag(GOOD) + "<tool_call>" + GOOD, "is not closed"),
    Case("second call broken", tag(GOOD) + tag("{"), "ends too early"),
    Case("close tag twice", tag(GOOD) + "</tool_call>", "without <tool_call>"),
    Case("trailing comma in the object", tag(GOOD[:-1] + ",}"), "trailing comma"),
    Case("trailing comma in arguments", call('{"key": "kiwi" , }'), "trailing comma"),
    Case("trailing comma in a list", call('{"key": ["kiwi",]}'), "trailing comma"),
    Case("single quotes", tag(GOOD.replace('"', "'")), "single quotes"),
    Case("single quotes in arguments", call("{'key': 'kiwi'}"), "single quotes"),
    Case("bare words", tag("lookup(kiwi)"), "invalid JSON in a tool call at character 1"),
    Case("bare key", tag('{name: "lookup", "arguments": {}}'), "invalid JSON"),
    Case("missing comma", tag('{"name": "lookup" "arguments": {}}'), "invalid JSON"),
    Case("missing colon", tag('{"name" "lookup"}'), "invalid JSON"),
    Case("NaN", call('{"key": NaN}'), "NaN is not JSON"),
    Case("infinity", call('{"key": -Infinity}'), "-Infinity is not JSON"),
    Case("overflowing number", call('{"key": 1e999}'), "too large"),
    Case("number of 5000 digits", call('{"key": %s}' % ("9" * 5000)), "too long"),
    Case("duplicate key in arguments", call('{"key": "kiwi", "key": "plum"}'), "duplicate key"),
    Case("duplicate name", tag('{"name": "a", "name": "b", "arguments": {}}'), "duplicate key"),
    Case("arguments a list", call('["kiwi"]'), "'arguments' must be an object, not a list"),
    Case("arguments a number", call("3"), "'arguments' must be an object, not a number"),
    Case("arguments a boolean", call("true"), "'arguments' must be an object, not a boolean"),
    Case("arguments null", call("null"), "'arguments' must be an object, not null"),
    Case("arguments missing", tag('{"name": "lookup"}'), "no 'arguments'"),
    Case("arguments under another name", tag('{"name": "lookup", "parameters": {}}'), "no 'arguments'"),
    Case("arguments a plain string", call('"kiwi"'), "does not encode an object"),
    Case("arguments an encoded list", call('"[1]"'), "does not encode an object"),
    Case("arguments an encoded object and more", call('"{} x"'), "does not encode an object"),
    Case("arguments encoded with a duplicate", call(r'"{\"a\": 1, \"a\": 2}"'), "duplicate key"),
    Case("arguments encoded twice", call(r'"\"{}\""'), "does not encode an object"),
    Case("name missing", tag('{"arguments": {"key": "kiwi"}}'), "no 'name'"),
    Case("name as the key", tag('{"lookup": {"key": "kiwi"}}'), "no 'name'"),
    Case("name a number", call("{}", "5"), "'name' must be a string, not a number"),
    Case("name null", call("{}", "null"), "'name' must be a string, not null"),
    Case("name an object", call("{}", "{}"), "'name' must be a string, not an object"),
    Case("name empty", call("{}", '""'), "'name' is empty"),
    Case("name blank", call("{}", '"  "'), "'name' is empty"),
    Case("unexpected key", tag(GOOD[:-1] + ', "id": 1}'), "unexpected key 'id'"),
    Case("code fence", tag(f"```json\n{GOOD}\n```"), "code fence"),
    Case("text after the object", tag(GOOD + " done"), "text after the JSON object"),
    Case("text before the object", tag("call: " + GOOD), "invalid JSON"),
    Case("empty tag", "<tool_call></tool_call>", "empty tool call"),
    Case("blank tag", tag("  "), "empty tool call"),
    Case("open tag at the end", "I will look.<tool_call>", "empty tool call"),
    Case("upper case tag", f"<TOOL_CALL>{GOOD}</TOOL_CALL>", "wrong tag <TOOL_CALL>: write <tool_call>"),
    Case("close tag in another case", f"<tool_call>{GOOD}</Tool_Call>", "wrong tag </Tool_Call>"),
    Case("tag with a space", f"<tool_call >{GOOD}</tool_call>", "wrong tag <tool_call >"),
    Case("plural tag", f"<tool_calls>{GOOD}</tool_calls>", "wrong tag <tool_calls>"),
    Case("tag with a hyphen", f"<tool-call>{GOOD}</tool-call>", "wrong tag <tool-call>"),
    Case("byte order mark", tag("\ufeff" + GOOD), "byte order mark"),
    Case("line comment", tag('{"name": "lookup", // which\n "arguments": {}}'), "comment"),
    Case("block comment", tag('{/* x */ "name": "lookup", "arguments": {}}'), "comment"),
    Case("Python true", call('{"key": True}'), "True is Python"),
    Case("Python none", call('{"key": None}'), "None is Python"),
    Case("control character", call('{"key": "ki\x01wi"}'), "control character"),
    Case("raw line end in a string", call('{"key": "ki\nwi"}'), "control character"),
    Case("null character between", tag('{\x00"name": "lookup"}'), "invalid JSON"),
    Case("escaped lone surrogate", call(r'{"key": "\ud800"}'), "unpaired surrogate"),
    Case("raw lone surrogate", call('{"key": "\ud800"}'), "unpaired surrogate"),
    Case("lone surrogate in a key", call(r'{"\udc00": 1}'), "unpaired surrogate"),
    Case("lone surrogate, arguments encoded", call(r'"{\"a\": \"\\ud800\"}"'), "unpaired surrogate"),
    Case("bad escape", call(r'{"key": "\x41"}'), "invalid JSON"),
    Case("nested past the limit", call('{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH), "nested deeper"),
    Case("nested 100 000 deep", call("[" * 100_000 + "]" * 100_000), "nested deeper"),
    Case("open brackets without end", tag("[" * 100_000), "nested deeper"),
    Case("unclosed thought", "<think>I look it up. " + tag(GOOD), "<think> is not closed"),
    Case("call, then an unclosed thought", tag(GOOD) + "<think>hm", "<think> is not closed"),
    Case("malformed after a thought", "<think>x</think>" + tag("{"), "ends too early"),
    Case(
        "half a call in the thought", f"<think><tool_call></think>{GOOD}</tool_call>", "without <tool_call>"
    ),
]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.id)
def test_malformed_emission_is_an_error_with_one_reason_and_no_call(case: Case) -> None:
    action = parse_tool_calls(case.text)
    assert action.parse is Parse.ERROR
    assert case.reason in action.parse_error
    assert "\n" not in action.parse_error
    assert action.tool_calls == ()


def looked_up(arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name="lookup", arguments=arguments)


DEEPEST = '{"a":' * (MAX_DEPTH - 2) + "{}" + "}" * (MAX_DEPTH - 2)
WELL_FORMED = [
    ("one call", tag(GOOD), "", (KIWI,)),
    ("no line ends", f"<tool_call>{GOOD}</tool_call>", "", (KIWI,)),
    ("text around", f"First.\n{tag(GOOD)}\nThen.", "First.\n\nThen.", (KIWI,)),
    ("keys swapped", tag('{"arguments": {"key": "kiwi"}, "name": "lookup"}'), "", (KIWI,)),
    ("two calls", tag(GOOD) + "\n" + call('{"n": 1}'), "", (KIWI, looked_up({"n": 1}))),
    ("the same call twice", tag(GOOD) * 2, "", (KIWI, KIWI)),
    ("no arguments", call("{}"), "", (looked_up({}),)),
    ("arguments encoded", call(r'"{\"key\": \"kiwi\"}"'), "", (KIWI,)),
    ("call after thought", f"<think>{tag(GOOD)}</think>{tag(GOOD)}", "", (KIWI,)),
    ("thought opened by the prompt", f"{tag('{')} no</think>{tag(GOOD)}", "", (KIWI,)),
    ("call in a thought opened by the prompt", f"{call('{}')}</think>{tag(GOOD)}", "", (KIWI,)),
    ("tag in a string", call('{"t": "</tool_call>"}'), "", (looked_up({"t": "</tool_call>"}),)),
    ("surrogate pair", call(r'{"t": "\ud83e\udd5d"}'), "", (looked_up({"t": "\U0001f95d"}),)),
    ("nested to the limit", call(DEEPEST), "", (looked_up(json.loads(DEEPEST)),)),
]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [case[1:] for case in WELL_FORMED],
    ids=[case[0] for case in WELL_FORMED],
)
def test_well_formed_calls(text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    action = parse_tool_calls(text)
    assert (action.parse, action.parse_error) == (Parse.OK, "")
    assert action.tool_calls == calls
    assert action.content == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", ""),
        (" Answer: 417\n", "Answer: 417"),
        (GOOD, GOOD),
        (f"```json\n{GOOD}\n```", f"```json\n{GOOD}\n```"),
        (f"<think>{tag(GOOD)}</think>Answer: 417", "Answer: 417"),
        ("<think>a <think> b</think> c</think>Answer: 417", "Answer: 417"),
        ("It was 3 < 4 > 2", "It was 3 < 4 > 2"),
    ],
)
def test_text_without_a_call(text: str, content: str) -> None:
    action = parse_tool_calls(text)
    assert (action.parse, action.content, action.tool_calls) == (Parse.NONE, content, ())


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown tool-call format 'herms', did you mean 'hermes'"):
        parse_tool_calls("", format="herms")


# ---------------------------------------- properties

PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<TOOL_CALL>", "```", "//", "\n", GOOD),
    *("{", "}", "[", "]", ",", ":", '"', "'", "\\", "{}", "null", "NaN", "1e999"),
    *("name", "arguments", '"name"', '"arguments"', '"key"', "\\ud800", "\ud800", "\x00", "\ufeff"),
]
FRAGMENTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
# Any text, text of the fragments that calls consist of, and such text where a call is expected.
TEXTS = st.text() | FRAGMENTS | FRAGMENTS.map(tag)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
CALLS = st.builds(
    ToolCall,
    name=st.text(min_size=1).filter(str.strip),
    arguments=st.dictionaries(st.text(), JSON_VALUES, max_size=4),
)


def json_objects_in(text: str) -> list[object]:
    """Every JSON object that starts somewhere in `text`, as the standard library reads it."""
    found = []
    for start, character in enumerate(text):
        if character == "{":
            try:
                found.append(json.JSONDecoder().raw_decode(text, start)[0])
            except (ValueError, RecursionError):
                continue
    return found


@settings(deadline=None)
@given(TEXTS)
def test_no_text_raises_and_no_call_is_invented(text: str) -> None:
    action = parse_tool_calls(text)
    assert (action.parse is Parse.OK) == bool(action.tool_calls)
    assert (action.parse is Parse.ERROR) == bool(action.parse_error)
    for found in action.tool_calls:
        spelt = {"name": found.name, "arguments": dict(found.arguments)}
        encoded = [
            {"name": value["name"], "arguments": json.loads(value["arguments"])}
            for value in json_objects_in(text)
            if isinstance(value, dict) and isinstance(value.get("arguments"), str)
        ]
        assert spelt in json_objects_in(text) or spelt in encoded


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_written_calls_are_read_back(calls: list[ToolCall], ascii_only: bool, encoded: bool) -> None:
    def write(item: ToolCall) -> str:
        arguments = json.dumps(item.arguments) if encoded else item.arguments
        return tag(json.dumps({"name": item.name, "arguments": arguments}, ensure_ascii=ascii_only))

    action = parse_tool_calls("\n".join(map(write, calls)))
    assert action.parse is Parse.OK, action.parse_error
    assert list(action.tool_calls) == calls


@settings(deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=2), st.data())
def test_a_cut_emission_never_yields_a_part_of_its_calls(calls: list[ToolCall], data: st.DataObject) -> None:
    texts = [tag(json.dumps({"name": item.name, "arguments": dict(item.arguments)})) for item in calls]
    cut = data.draw(st.integers(len(texts[0][:11]), len(texts[-1]) - 1))
    action = parse_tool_calls("".join(texts[:-1]) + texts[-1][:cut])
    assert action.parse is Parse.ERROR
    assert action.tool_calls == ()
