"""Settings of every part, as plain dataclasses: torch-free, so that a configuration is read and checked in
milliseconds. `launch.config` composes them into the Hydra schema; each adapter is given only its own group.

Units are in the names. `*_per_step` counts per optimizer step of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunSettings:
    name: str = "${recipe}"
    """Folder below `dir`; an existing finished run is never overwritten."""
    dir: str = "runs"
    seed: int = 0
    resume: str = "auto"
    """auto (continue an unfinished run of this name) | never | PATH of a checkpoint."""
    deterministic: bool = False
    """One engine, one sequence at a time, no prefix cache, seeds per request: bitwise repeatable, slow."""


@dataclass
class ModelSettings:
    path: str = ""
    """Hugging Face folder (config, tokenizer, template, safetensors), or `tiny` (made here)."""
    dtype: str = "float32"
    """float32 | bfloat16."""


@dataclass
class MeshSettings:
    """How many ranks share the policy: world size = tp x pp x dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    distributed_optimizer: bool = False
    threads_per_rank: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass
class OptimizerSettings:
    """AdamW with linear warm-up and a decay over the last `decay_fraction` of `total_steps`."""

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_grad_norm: float = 1.0
    warmup_steps: int = 0
    decay_fraction: float = 0.0
    """Share of the steps, at the end, over which the rate falls linearly to `min_rate_fraction`."""
    min_rate_fraction: float = 0.05
    total_steps: int = 0
    """0 leaves the rate constant after warm-up."""


@dataclass
class TrainerSettings:
    tokens_per_microbatch: int = 4096
    bucket_mib: int = 64
    """Size of one weight-broadcast bucket."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row that a non-finite loss or gradient may skip before the run stops."""


@dataclass
class RolloutSettings:
    engines: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens_per_turn: int = 64
    max_turns: int = 10
    max_context_tokens: int = 4096
    """Context + action of the longest step; the engine's max_model_len."""
    max_concurrent_episodes: int = 256
    refills: int = 3
    """Times that an attempt which infrastructure spoilt is played again."""
    engine_threads: int = 1
    engine_cores: str = "auto"
    """Cores of an engine's threads on CPU (`0`, `0-1`); auto spreads engines over the cores."""
    kv_cache_gib: float = 1.0
    max_sequences: int = 256
    tokens_per_iteration: int = 8192
    """Token budget of one engine iteration (vLLM's max_num_batched_tokens)."""
    block_tokens: int = 32
    request_timeout_s: float = 300.0
    start_timeout_s: float = 600.0


@dataclass
class AlgorithmSettings:
    advantage: str = "grpo"
    normalise_std: bool = True
    """GRPO: divide by the group's unbiased standard deviation."""
    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    weighting: str = "token"
    """token | step | trajectory | group | task: what weighs equally in the loss."""
    truncation_penalty: float = 0.0
    invalid_penalty: float = -0.2
    updates_per_step: int = 1
    """Optimizer steps per loop step, each over whole prompt groups."""


@dataclass
class NumericsSettings:
    """Bars of the trainer-engine log-prob gap on a version-matched batch; beyond them the run stops."""

    max_logprob_gap: float = 5e-4
    p99_logprob_gap: float = 1e-4


@dataclass
class ScheduleSettings:
    steps: int = 100
    groups_per_step: int = 16
    attempts_per_group: int = 8


@dataclass
class ColdStartSettings:
    """Supervised steps on the task's demonstrations before RL; 0 steps leaves it out."""

    steps: int = 0
    demonstrations_per_step: int = 16
    habit: float = 0.0
    """Probability that a demonstration shows the task's documented bad habit at each chance."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


@dataclass
class EnvSettings:
    name: str = "lookup"
    train_samples: int = 4096
    heldout_samples: int = 400


@dataclass
class EvalSettings:
    every_steps: int = 0
    """0 evaluates only before the first and after the last step."""
    samples: int = 128
    """Held-out samples of an evaluation during training."""
    final_samples: int = 0
    """Held-out samples before the first and after the last step; 0 takes all."""
    attempts: int = 4
    """Sampled attempts per held-out sample in the last evaluation (pass@k)."""


@dataclass
class CheckpointSettings:
    every_steps: int = 0
    """0 saves only at the end and on an interrupt."""
    keep: int = 2


@dataclass
class TrackingSettings:
    console: bool = True
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "megatron-agent"
    trajectories_per_step: int = 16
    """Trajectories written per step, readable; 0 writes none."""


@dataclass
class ClusterSettings:
    address: str = "local"
    """`local` starts a Ray of its own; otherwise the address of a running one."""
    object_store_gib: float = 0.5
