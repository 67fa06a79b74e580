"""A model small enough to be trained on two CPU cores, made here from nothing: `model.path=tiny`.

`make_tiny_model` writes a complete Hugging Face folder: a Qwen2 configuration of half a million parameters,
random initial weights, a tokenizer trained on demonstrations of the lookup task, and a chat template with
tools. Rules:

- The same seed gives the same bytes, in every process. Weights come from numpy, not from a torch version.
- A folder appears complete or not at all: it is written beside its place and renamed.
- A folder of the same recipe whose files are as they were written is used again. One of another recipe is
  replaced. Files that are not ours, or that were changed since, are never touched: FileExistsError.

Sizes, initial standard deviation and rope base are those under which a model of two layers learns to copy
within a minute: with the usual 0.02 and 10 000 it does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import envs.lookup
from envs.lookup import KEYS, NO_SUCH_KEY, Lookup, LookupTask
from megatron_agent.contracts import Message, Sample
from megatron_agent.files import sync_folder

VOCABULARY = 512
HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM = 128, 384, 2, 4, 32
INITIAL_STD = 0.06
ROPE_BASE = 100.0
MAX_POSITIONS = 1024
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
PAD, END = SPECIAL_TOKENS[0], SPECIAL_TOKENS[2]
CORPUS_SAMPLES = 2000
CORPUS_HABIT = 0.3

TEMPLATE_FILE = Path(__file__).parent / "assets" / "tiny_chat_template.jinja"
STAMP_FILE = "tiny_model.json"

Weights = dict[str, NDArray[np.float32]]


def make_tiny_model(folder: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Write the model into `folder`, or use what is there; returns `folder`.

    `tied` shares the embedding with the output layer. Raises FileExistsError where `folder` holds something
    that this function did not write, or that was changed since.
    """
    recipe = _recipe(seed, tied)
    if _usable(folder, recipe):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        _write_files(fresh, recipe, seed, tied)
        _move_into_place(fresh, folder, recipe)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


# ---------------------------------------- the folder


def _recipe(seed: int, tied: bool) -> str:
    """Digest of the sources that the content follows from."""
    sources = (TEMPLATE_FILE, Path(__file__), Path(envs.lookup.__file__))
    digest = hashlib.sha256(json.dumps([seed, tied]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _write_files(folder: Path, recipe: str, seed: int, tied: bool) -> None:
    """All files, and last the stamp with their digests."""
    _write_json(folder / "config.json", tiny_config(tied))
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "eos_token_id": [SPECIAL_TOKENS.index(END)], "pad_token_id": 0},
    )
    train_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "special_tokens_map.json", {"eos_token": END, "pad_token": PAD})
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text())
    save_file(initial_weights(seed, tied), folder / "model.safetensors", metadata={"format": "pt"})
    digests = _digests(folder)
    for name in digests:
        (folder / name).chmod(0o644)
        _sync_file(folder / name)
    _write_json(folder / STAMP_FILE, {"recipe": recipe, "seed": seed, "tied": tied, "files": digests})
    _sync_file(folder / STAMP_FILE)
    sync_folder(folder)


def _usable(folder: Path, recipe: str) -> bool:
    """Whether `folder` is what `recipe` gives. False where it may be written or replaced; raises
    FileExistsError where it may not."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        stamp = json.loads((folder / STAMP_FILE).read_text())
        digests = stamp["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileExistsError(f"{folder} exists and is not a generated tiny model: {error}") from error
    if _digests(folder) != digests:
        raise FileExistsError(
            f"{folder} was changed since it was generated; remove it or name another folder"
        )
    return bool(stamp["recipe"] == recipe)


def _move_into_place(fresh: Path, folder: Path, recipe: str) -> None:
    """Rename. Another process may have put the same model there in the meantime: then that one stays."""
    if _usable(folder, recipe):
        return
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        with suppress(FileNotFoundError):
            os.rename(folder, old)
        shutil.rmtree(old)
    try:
        os.rename(fresh, folder)
    except OSError:
        if not _usable(folder, recipe):
            raise
    sync_folder(folder.parent)


def _digests(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of every file but the stamp."""
    files = sorted(path for path in folder.iterdir() if path.name != STAMP_FILE and path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# ---------------------------------------- weights


def tiny_config(tied: bool = False) -> dict[str, Any]:
    """`config.json`. The rope base stands in both places that readers look at."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIAL_STD,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "dtype": "float32",
        "use_cache": True,
    }


def weight_shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape. The output layer is last, so that `tied` leaves the others as they are."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q", "k", "v"):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (HEADS * HEAD_DIM,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def initial_weights(seed: int, tied: bool) -> Weights:
    """Matrices normal with `INITIAL_STD`, norms 1, biases 0."""
    rng = np.random.Generator(np.random.PCG64(seed))
    weights: Weights = {}
    for name, shape in weight_shapes(tied).items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            weights[name] = (INITIAL_STD * rng.standard_normal(shape)).astype(np.float32)
    return weights


# ---------------------------------------- text


def render(messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool = False) -> str:
    """The text of a conversation under the folder's chat template, the same as transformers renders."""
    return _template().render(
        messages=list(messages), tools=list(tools) or None, add_generation_prompt=generate
    )


@cache
def _template() -> Template:
    # As transformers sets up the environment of chat templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(TEMPLATE_FILE.read_text())


def demonstration(sample: Sample, seed: int, habit: float) -> list[Message]:
    """The conversation of the task's solver with the table of `sample`."""
    solver = LookupTask().solver(sample, seed, habit)
    messages: list[Message] = list(sample.prompt)
    while True:
        text = solver.reply(messages)
        messages.append({"role": "assistant", "content": text})
        if not text.startswith("<tool_call>"):
            return messages
        key = json.loads(text.split("\n")[1])["arguments"]["key"]
        found = sample.env_kwargs["table"].get(key, NO_SUCH_KEY)
        messages.append({"role": "tool", "content": found})


def corpus() -> Iterator[str]:
    """Rendered demonstrations, the same for every seed of the weights: models share a tokenizer. Cut at the
    special tokens, which the trainer would otherwise learn to spell."""
    tools = [Lookup().schema()]
    template = _template()
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    for index, sample in enumerate(LookupTask().samples("train", CORPUS_SAMPLES, seed=0)):
        text = template.render(messages=demonstration(sample, index, CORPUS_HABIT), tools=tools)
        yield from special.split(text)


# ---------------------------------------- tokenizer

QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 cuts text before the merges: at every digit, between words and punctuation. Others would do,
but transformers takes these for every model of type qwen2, whatever tokenizer.json says."""


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE in which each key is one token, alone and with the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    for key in KEYS:
        if len(tokenizer.encode(f" {key}").ids) != 1:
            raise RuntimeError(f"key {key!r} is not one token")
    return tokenizer


def _tokenizer_config() -> Mapping[str, Any]:
    added = {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_POSITIONS,
        "pad_token": PAD,
        "tokenizer_class": "Qwen2Tokenizer",
    }
