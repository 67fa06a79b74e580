"""The policy model: a megatron-core GPTModel whose last stage stops before the output layer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_agent.settings import MeshSettings
from parallel.attention import PackedAttention, RMSNorm
from parallel.hf_config import Architecture
from parallel.mesh import stage_layers


class PolicyModel(GPTModel):
    """GPTModel that yields hidden states on the last stage; log-probs are taken from them in chunks, so
    that `[tokens, vocab]` logits never exist."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[tokens, 1, hidden]` after the last norm (last stage) or the last layer (other stages)."""
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """`[vocab/tp, hidden]`; only on the last stage."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def transformer_config(
    arch: Architecture, mesh: MeshSettings, dtype: torch.dtype, deterministic: bool
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.intermediate,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # apex's kernel, or the one that stands in for it on CPU.
        gradient_accumulation_fusion=parallel_layers._grad_accum_fusion_available,
        # Fusions that need Transformer Engine or apex.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Packed micro-batches differ in length; megatron-core then insists on this dispatcher.
        variable_seq_lengths=mesh.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # Losses arrive as sums over global denominators: gradients are summed over dp, never averaged.
        calculate_per_token_loss=True,
        deterministic_mode=deterministic,
        # Weights are always loaded. Leaving initialisation out altogether would also leave out the marks by
        # which the gradient norm tells split parameters from copies.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
    )


def _leave(weight: Tensor) -> Tensor:
    return weight


def build_model(arch: Architecture, config: TransformerConfig, groups: ProcessGroupCollection) -> PolicyModel:
    """The part of the model that this rank holds; parameters are not initialised."""
    stage, stages = groups.pp.rank(), groups.pp.size()
    model = PolicyModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, arch, len(stage_layers(stage, arch.layers, stages))),
        vocab_size=arch.vocab,
        max_sequence_length=arch.max_positions,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=arch.tied,
        # Our core attention applies the rotary positions.
        position_embedding_type="none",
        pg_collection=groups,
    )
    # Norm weights are made in torch's default dtype.
    return model.to(config.params_dtype)  # type: ignore[no-any-return]


def _layer_spec(config: TransformerConfig, arch: Architecture, layers: int) -> TransformerBlockSubmodules:
    """megatron-core's local spec with our core attention and norms."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"rope_theta": arch.rope_theta})
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
