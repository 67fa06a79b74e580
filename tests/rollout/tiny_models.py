"""Tiny Hugging Face models, their weights as an update, and teacher forcing, for the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_agent.contracts import TensorEntry, WeightExport, WeightManifest
from megatron_agent.digests import digest
from megatron_agent.settings import RolloutSettings

VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SETTINGS = RolloutSettings(
    max_context_tokens=512, kv_cache_gib=0.1, max_sequences=32, tokens_per_iteration=1024, block_tokens=32
)
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the event loop of the tests' engines."""
Weights = dict[str, NDArray[np.float32]]


def tiny_model(tied: bool, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).eval()


def save_model(folder: Path, tied: bool, seed: int = 0) -> Path:
    tiny_model(tied, seed).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """A byte-level BPE with some merges, the special tokens of the hermes form, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 32,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user assistant system tool look up the answer of the question"] * 8, trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return folder


def weights_of(model: Qwen2ForCausalLM) -> Weights:
    """The tensors of the checkpoint layout: a tied head is not among them."""
    tied = model.config.tie_word_embeddings
    return {
        name: tensor.detach().float().numpy().copy()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def export_of(weights: Mapping[str, NDArray[np.float32]], version: int, buckets: int = 2) -> WeightExport:
    """An update whose bucket handles are the arrays themselves."""
    entries = tuple(
        TensorEntry(
            name=name, shape=array.shape, dtype="float32", owner=0, bucket=i % buckets, digest=digest(array)
        )
        for i, (name, array) in enumerate(weights.items())
    )
    manifest = WeightManifest(version=version, tensors=entries)
    payloads = [{e.name: weights[e.name] for e in manifest.in_bucket(i)} for i in range(manifest.buckets)]
    return WeightExport(manifest=manifest, buckets=payloads)


def teacher_forced(
    model: Qwen2ForCausalLM, prompt: Sequence[int], action: Sequence[int], temperature: float
) -> NDArray[np.float32]:
    """`[action]` float32: log-prob of each action id after what stands before it."""
    ids = torch.tensor([[*prompt, *action]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    answer: NDArray[np.float32] = logprobs.gather(1, torch.tensor(action)[:, None])[:, 0].numpy()
    return answer
