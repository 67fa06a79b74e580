"""The tiny model's folder: the same bytes every time, and what transformers makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from envs.lookup import KEYS, Lookup, LookupTask, call_text
from launch.tiny_model import (
    SPECIAL_TOKENS,
    STAMP_FILE,
    VOCABULARY,
    demonstration,
    initial_weights,
    make_tiny_model,
    render,
    tiny_config,
    weight_shapes,
)
from rollout.tool_calls import parse_tool_calls

TOOLS = [Lookup().schema()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------- the folder


def test_the_same_seed_gives_the_same_bytes_in_another_process(folder: Path, tmp_path: Path) -> None:
    code = "import sys, pathlib, launch.tiny_model as t; t.make_tiny_model(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": "123", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], check=True, env=environment)
    assert contents(tmp_path / "other") == contents(folder)


def test_seeds_differ_in_weights_alone(folder: Path, tmp_path: Path) -> None:
    other = contents(make_tiny_model(tmp_path / "one", seed=1))
    differing = {name for name, data in contents(folder).items() if other[name] != data}
    assert differing == {"model.safetensors", STAMP_FILE}


def test_a_folder_of_the_recipe_is_used_again_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    before = (folder / "model.safetensors").stat()
    make_tiny_model(folder)
    after = (folder / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert list(tmp_path.iterdir()) == [folder]


def test_another_recipe_replaces_a_folder_that_was_generated(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    make_tiny_model(folder, seed=1, tied=True)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_changed_folder_is_never_touched(tmp_path: Path, seed: int) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "trained.safetensors").write_bytes(b"weights of mine")
    before = contents(folder)
    with pytest.raises(FileExistsError, match="was changed since it was generated"):
        make_tiny_model(folder, seed=seed)
    assert contents(folder) == before


def test_somebody_elses_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="not a generated tiny model"):
        make_tiny_model(tmp_path)
    assert contents(tmp_path) == {"config.json": b"{}"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "deep" / "tiny")
    (tmp_path / "empty").mkdir()
    assert contents(make_tiny_model(tmp_path / "empty")) == contents(tmp_path / "deep" / "tiny")


def test_a_failure_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of disk")

    monkeypatch.setattr("launch.tiny_model.train_tokenizer", fail)
    with pytest.raises(RuntimeError, match="out of disk"):
        make_tiny_model(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------- weights


def test_weights_have_the_stated_distribution(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {name: array.shape for name, array in weights.items()} == weight_shapes(tied=False)
    for name, array in weights.items():
        assert array.dtype == np.float32
        if array.ndim == 2:
            assert array.std() == pytest.approx(0.06, rel=0.02)
            assert abs(array.mean()) < 1e-3
        else:
            assert (array == (1 if name.endswith("norm.weight") else 0)).all()


def test_tied_leaves_out_the_output_layer_and_nothing_else() -> None:
    tied, untied = initial_weights(3, tied=True), initial_weights(3, tied=False)
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert all(np.array_equal(tied[name], untied[name]) for name in tied)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_model_with_these_weights(tmp_path: Path, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / "tiny", tied=tied)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    expected = initial_weights(0, tied)
    if tied:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], expected[name]) for name in state)
    assert model.config.rope_parameters["rope_theta"] == tiny_config()["rope_theta"] == 100.0
    assert model.config.max_position_embeddings == 1024
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(VOCABULARY)[None]).logits).all()


# ---------------------------------------- tokenizer


def test_each_key_digit_and_special_token_is_one_token(tokenizer: Any) -> None:
    for text in [*KEYS, *(f" {key}" for key in KEYS), *"0123456789", *SPECIAL_TOKENS]:
        assert len(tokenizer.encode(text)) == 1, text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer) <= VOCABULARY
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_transformers_encodes_as_the_file_does(folder: Path, tokenizer: Any) -> None:
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    samples = LookupTask().samples("train", 100, seed=9)
    texts = [render(demonstration(sample, 0, 0.5), TOOLS) for sample in samples]
    for text in [*texts, "don't  \n\n{\n x_y\t12.5 \u00e9\u4e2d\U0001f95d<think>\r\n"]:
        assert tokenizer.encode(text, add_special_tokens=False) == raw.encode(text).ids


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_any_text_survives(tokenizer: Any, text: str) -> None:
    import unicodedata

    ids = tokenizer.encode(text, add_special_tokens=False)
    # The tokenizer composes characters, as Qwen2's does.
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize("NFC", text)


def test_prompts_and_calls_are_short(tokenizer: Any) -> None:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for sample in LookupTask().samples("heldout", 100, seed=0):
        assert count(render(sample.prompt, TOOLS, generate=True)) <= 70
        assert count(render(demonstration(sample, 0, 0.0), TOOLS)) <= 256
    assert count(call_text("kiwi")) <= 20


# ---------------------------------------- template

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": TEXT.filter(str.strip), "arguments": st.dictionaries(TEXT, TEXT | st.integers(), max_size=2)}
    ),
    min_size=1,
    max_size=3,
)
ASSISTANT = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT}) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT | st.none(), "tool_calls": CALLS}
)
SYSTEM = st.fixed_dictionaries({"role": st.just("system"), "content": TEXT})
OTHER = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXT})
CONVERSATIONS = st.tuples(
    st.lists(SYSTEM, max_size=1), st.lists(OTHER | ASSISTANT | SYSTEM, min_size=1, max_size=8)
).map(lambda parts: parts[0] + parts[1])


@given(CONVERSATIONS, st.booleans())
@settings(deadline=None)
def test_a_longer_conversation_extends_the_text_of_a_shorter_one(
    messages: list[dict[str, Any]], tools: bool
) -> None:
    schemas = TOOLS if tools else []
    full = render(messages, schemas)
    for length in range(1, len(messages)):
        if messages[length - 1]["role"] == messages[length]["role"] == "tool":
            continue  # results of one turn come together and share a user turn
        assert full.startswith(render(messages[:length], schemas))
        if messages[length]["role"] == "assistant":
            assert full.startswith(render(messages[:length], schemas, generate=True))


@given(messages=CONVERSATIONS, tools=st.booleans(), generate=st.booleans())
@settings(deadline=None)
def test_transformers_renders_the_same_text(
    tokenizer: Any, messages: list[dict[str, Any]], tools: bool, generate: bool
) -> None:
    schemas = TOOLS if tools else []
    text = tokenizer.apply_chat_template(
        messages, tools=schemas or None, tokenize=False, add_generation_prompt=generate
    )
    assert text == render(messages, schemas, generate=generate)


@given(CALLS, st.booleans())
@settings(deadline=None)
def test_rendered_calls_are_parsed_back(calls: list[dict[str, Any]], openai: bool) -> None:
    def as_openai(call: dict[str, Any]) -> dict[str, Any]:
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        return {"id": "1", "type": "function", "function": function}

    written = [as_openai(call) if openai else call for call in calls]
    text = render([{"role": "assistant", "content": "", "tool_calls": written}])
    body = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    found = parse_tool_calls(body)
    assert [{"name": call.name, "arguments": call.arguments} for call in found.tool_calls] == calls


def test_a_call_is_rendered_as_the_solver_writes_it() -> None:
    structured = {"role": "assistant", "tool_calls": [{"name": "lookup", "arguments": {"key": "kiwi"}}]}
    written = {"role": "assistant", "content": call_text("kiwi")}
    assert render([structured]) == render([written])


def test_results_of_one_turn_share_a_user_turn() -> None:
    messages = [{"role": "tool", "content": "see plum"}, {"role": "tool", "content": "value 417"}]
    assert render([{"role": "user", "content": "Go."}, *messages], generate=True) == (
        "<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsee plum\n</tool_response>"
        "\n<tool_response>\nvalue 417\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
