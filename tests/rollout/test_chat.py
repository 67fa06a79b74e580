"""Token ids of conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models as models
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CALL, TOOL

from rollout.chat import ChatTokens, TemplateError

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=30).map(lambda t: f"a{t}z")
APPENDED = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": TEXT}), max_size=3
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(models.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, APPENDED), min_size=1, max_size=3), tools=st.booleans())
def test_turns_concatenate_to_the_whole_rendering(chat: ChatTokens, turns: list, tools: bool) -> None:
    schemas = [TOOL] if tools else []
    messages: list = [{"role": "user", "content": "start"}]
    ids = chat.open_ids(messages, schemas).tolist()
    for text, appended in turns:
        ids += [*chat.encode(text).tolist(), chat.stop_token_ids[0], *chat.continue_ids(appended).tolist()]
        messages = [*messages, {"role": "assistant", "content": text}, *appended]
    assert ids == chat.open_ids(messages, schemas).tolist()


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_an_action_reads_back(chat: ChatTokens, text: str) -> None:
    ids = [*chat.encode(text).tolist(), chat.stop_token_ids[0]]
    assert chat.decode_action(ids) == text
    assert chat.decode_action(ids[:-1]) == text, "without a stop token nothing is cut"


def test_special_tokens_of_a_call_are_kept(chat: ChatTokens) -> None:
    assert chat.decode_action(chat.encode(CALL)) == CALL
    assert chat.decode_action([]) == ""


def test_stop_tokens_are_the_templates_then_the_models(chat: ChatTokens) -> None:
    names = [chat.decode_action([0, token]) for token in chat.stop_token_ids]
    assert len(chat.stop_token_ids) == 2
    assert names == [chat.decode_action([0, token]) for token in chat.stop_token_ids]
    assert chat.encode("<|im_end|><|endoftext|>").tolist() == list(chat.stop_token_ids)


def test_renderings_are_cached_and_read_only(chat: ChatTokens) -> None:
    first = chat.open_ids([{"role": "user", "content": "x"}])
    assert chat.open_ids([{"role": "user", "content": "x"}]) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    assert first.dtype == np.int32


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    rewriting = models.TEMPLATE.replace(
        "{{ message.content }}<|im_end|>\n{% endif %}",
        "{% if loop.last or message.role != 'assistant' %}{{ message.content }}{% endif %}"
        "<|im_end|>\n{% endif %}",
    )
    chat = ChatTokens(models.save_tokenizer(tmp_path, rewriting))
    with pytest.raises(TemplateError, match="rewrites an earlier assistant turn"):
        chat.continue_ids([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("", "no chat template"),
        (
            models.TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"),
            "puts something",
        ),
        (models.TEMPLATE.replace("<|im_end|>", "END"), "no special token"),
        ("{{ raise_exception('never') }}", "fails"),
    ],
)
def test_unusable_templates_are_named(template: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=reason):
        ChatTokens(models.save_tokenizer(tmp_path, template))
