"""Settings of every part, as plain dataclasses: torch-free, so that a configuration is read and checked in
milliseconds. `launch.config` composes them into the Hydra schema; each adapter is given only its own group.

Units are in the names. `*_per_step` counts per optimizer step of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunSettings:
    name: str = "${recipe}"
    """Folder below `dir`. The default takes a free one (NAME, NAME-2, ...); a finished one is refused."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of initial weights, data order and sampling."""
    resume: str = "auto"
    """auto (continue an unfinished run of this name) | never | PATH of a checkpoint."""
    deterministic: bool = False
    """One engine, one sequence at a time, no prefix cache, seeds per request: bitwise repeatable, slow."""


@dataclass
class ModelSettings:
    path: str = ""
    """Hugging Face folder (config, tokenizer, template, safetensors), `tiny` (made here) or `smollm2`
    (SmolLM2-135M-Instruct, fetched once)."""
    dtype: str = "float32"
    """float32 | bfloat16."""


@dataclass
class MeshSettings:
    """How many ranks share the policy: world size = tp x pp x dp."""

    tp: int = 1
    """Tensor parallel ranks: every layer is cut."""
    pp: int = 1
    """Pipeline stages: the layers are dealt out."""
    dp: int = 1
    """Data parallel replicas."""
    distributed_optimizer: bool = False
    """Spread optimizer state over the replicas."""
    threads_per_rank: int = 1
    """OpenMP threads of a rank on CPU; more threads than cores fight."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass
class OptimizerSettings:
    """AdamW with linear warm-up and a decay over the last `decay_fraction` of `total_steps`."""

    learning_rate: float = 1e-6
    """Peak rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_fraction: float = 0.0
    """Share of the steps, at the end, over which the rate falls linearly to `min_rate_fraction`."""
    min_rate_fraction: float = 0.05
    """Rate at the very end, as a fraction of the peak."""
    total_steps: int = 0
    """0 leaves the rate constant after warm-up."""


@dataclass
class TrainerSettings:
    tokens_per_microbatch: int = 4096
    """Token budget of one packed micro-batch; a longer row has one of its own."""
    bucket_mib: int = 64
    """Size of one weight-broadcast bucket."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row that a non-finite loss or gradient may skip before the run stops."""


@dataclass
class RolloutSettings:
    engines: int = 1
    """vLLM engines."""
    temperature: float = 1.0
    """Sampling temperature in training and in sampled evaluation."""
    top_p: float = 1.0
    """1 in training: a cut vocabulary cannot be trained on."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_new_tokens_per_turn: int = 64
    """Longest action, in tokens."""
    max_turns: int = 10
    """Actions of an episode before it is truncated."""
    max_context_tokens: int = 4096
    """Context + action of the longest step; the engine's max_model_len."""
    max_concurrent_episodes: int = 256
    """Episodes that are played at once."""
    refills: int = 3
    """Times that an attempt which infrastructure spoilt is played again."""
    engine_threads: int = 1
    """OpenMP threads of an engine on CPU."""
    engine_cores: str = "auto"
    """Cores of an engine's threads on CPU (`0`, `0-1`); auto spreads engines over the cores."""
    kv_cache_gib: float = 1.0
    """Key-value cache of an engine on CPU."""
    max_sequences: int = 256
    """Sequences that an engine runs at once."""
    tokens_per_iteration: int = 8192
    """Token budget of one engine iteration (vLLM's max_num_batched_tokens)."""
    block_tokens: int = 32
    """Tokens of a cache block; prefixes are shared in whole blocks."""
    request_timeout_s: float = 300.0
    """Deadline of one generation."""
    reward_timeout_s: float = 60.0
    """Deadline of one call of a sample's reward model."""
    start_timeout_s: float = 600.0
    """Deadline of an engine's start."""


@dataclass
class AlgorithmSettings:
    advantage: str = "grpo"
    """Estimator, by registered name or package.module:Name."""
    normalise_std: bool = True
    """GRPO: divide by the group's unbiased standard deviation."""
    loss: str = "ppo"
    """Policy loss, by registered name or package.module:Name."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = 0.28
    """Ratios are clipped above 1 + clip_high."""
    weighting: str = "token"
    """token | step | trajectory | group | task: what weighs equally in the loss."""
    truncation_penalty: float = 0.0
    """Added to the return of an attempt that a limit ended."""
    invalid_penalty: float = -0.2
    """Added to the return of an attempt that the agent's own doing made invalid."""
    updates_per_step: int = 1
    """Optimizer steps per loop step, each over whole prompt groups."""


@dataclass
class NumericsSettings:
    """Bars of the trainer-engine log-prob gap on a version-matched batch; beyond them the run stops."""

    max_logprob_gap: float = 5e-4
    """Largest gap of any token."""
    p99_logprob_gap: float = 1e-4
    """99th percentile of the gaps."""


@dataclass
class ScheduleSettings:
    steps: int = 100
    """Steps of the loop."""
    groups_per_step: int = 16
    """Samples that are played per step."""
    attempts_per_group: int = 8
    """Attempts at each sample, which share a baseline."""


@dataclass
class ColdStartSettings:
    """Supervised steps on the task's demonstrations before RL; 0 steps leaves it out."""

    steps: int = 0
    """Supervised optimizer steps."""
    demonstrations_per_step: int = 16
    """Demonstrations per optimizer step."""
    habit: float = 0.0
    """Probability that a demonstration shows the task's documented bad habit at each chance."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


@dataclass
class EnvSettings:
    name: str = "lookup"
    """Task, by registered name or package.module:Name."""
    train_samples: int = 4096
    """Instances to train on."""
    heldout_samples: int = 400
    """Instances that are only evaluated on."""
    train_files: list[str] = field(default_factory=list)
    """JSONL or parquet files to train on, all of their samples; empty: generated by the task."""
    heldout_files: list[str] = field(default_factory=list)
    """Files of the samples that are only evaluated on; empty: generated by the task."""


@dataclass
class DataSettings:
    """What `megatron-agent data TASK` writes; counts are env.train_samples and env.heldout_samples."""

    out: str = "data/${env.name}"
    """Folder of the files train and heldout; existing ones are never overwritten."""
    format: str = "jsonl"
    """jsonl | parquet."""


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
    stop_at_success: float = 0.0
    """Greedy held-out success at which training ends early; 0 never does."""
    patience: int = 0
    """Evaluations without a better greedy success after which training ends early; 0 never does."""
    api_mode: str = "tokens"
    """How `eval http://...` asks: tokens (ids in and out, vLLM servers) | chat (messages, any server)."""
    api_model: str = ""
    """Model that the server of `eval http://...` is asked for; empty takes the first that it lists."""
    api_requests: int = 64
    """Requests that `eval http://...` has open at once."""


@dataclass
class CheckpointSettings:
    every_steps: int = 0
    """0 saves only at the end and on an interrupt."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    asynchronous: bool = False
    """Write the shards while training goes on; a checkpoint counts from its commit marker on."""
    fully_parallel: bool = True
    """All data-parallel replicas write and read a part of the shards."""
    keep_best: bool = False
    """Save at every new best greedy held-out success, and keep the best beside the newest."""


@dataclass
class TrackingSettings:
    console: bool = True
    """A line per step."""
    tensorboard: bool = False
    """Write TensorBoard events."""
    wandb: bool = False
    """Write a wandb run (offline unless WANDB_MODE says otherwise)."""
    wandb_project: str = "megatron-agent"
    """Project of the wandb run."""
    trajectories_per_step: int = 16
    """Trajectories written per step, readable; 0 writes none."""


@dataclass
class ClusterSettings:
    address: str = "local"
    """`local` starts a Ray of its own; otherwise the address of a running one."""
    object_store_gib: float = 0.5
    """Object store of a Ray of its own."""
