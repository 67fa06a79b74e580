"""One rank of the policy, without Ray: a Megatron shard that trains, scores, exports and saves.

Every method is collective: all ranks call it with the same arguments. A batch that cannot be trained is
refused by all ranks before the first collective.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel import cpu_stand_in

cpu_stand_in.install()

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from megatron_agent.contracts import Floats, LossSpec, PackedBatch, TrainMetrics, WeightExport  # noqa: E402
from megatron_agent.errors import ConfigError  # noqa: E402
from megatron_agent.registries import LOSSES  # noqa: E402
from megatron_agent.settings import (  # noqa: E402
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    TrainerSettings,
)
from parallel.batches import MicroBatch, check_batch, micro_batch, scatter_log_probs  # noqa: E402
from parallel.checkpoint import (  # noqa: E402
    BackgroundSave,
    CheckpointError,
    begin_save,
    load_checkpoint,
    read_optimizer_settings,
)
from parallel.export import Bucket, export_weights  # noqa: E402
from parallel.hf_config import architecture, read_config  # noqa: E402
from parallel.logprob import taken_log_probs  # noqa: E402
from parallel.mesh import check_mesh, destroy_process_groups, init_process_groups  # noqa: E402
from parallel.model import PolicyModel, build_model, transformer_config  # noqa: E402
from parallel.optimizer import PolicyOptimizer  # noqa: E402
from parallel.weights import SafetensorsFolder, load_weights  # noqa: E402

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RENDEZVOUS_TIMEOUT_S = 1800.0

Consume = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, log-probs `[actions]`, entropy `[actions]`) to (loss, metrics)."""


class PolicyShard:
    """One rank of the mesh; `setup` makes it usable."""

    _saving: BackgroundSave | None = None

    def setup(
        self,
        rank: int,
        address: str,
        port: int,
        *,
        model_path: str,
        model: ModelSettings,
        mesh: MeshSettings,
        trainer: TrainerSettings,
        optimizer: OptimizerSettings,
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        """Join the other ranks, build the model and load its weights.

        Raises ConfigError with every reason why the model cannot run on the mesh.
        """
        config = read_config(model_path)
        problems = check_mesh(mesh, config)
        if model.dtype not in _DTYPES:
            problems.append(f"model.dtype: {model.dtype!r} is not supported (allowed: {', '.join(_DTYPES)})")
        if problems:
            raise ConfigError(problems)
        # megatron-core tells each rank about every fusion that the machine lacks.
        logging.getLogger("megatron").setLevel(logging.ERROR)
        torch.set_num_threads(mesh.threads_per_rank)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self.arch = architecture(config)
        self.mesh, self.trainer, self.dtype = mesh, trainer, _DTYPES[model.dtype]
        self.groups = init_process_groups(rank, mesh, address, port, _RENDEZVOUS_TIMEOUT_S)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        _seed_everything(seed, deterministic)
        self._build(deterministic)
        self._load_weights(model_path)
        self.reset_optimizer(optimizer)

    def _build(self, deterministic: bool) -> None:
        config = transformer_config(self.arch, self.mesh, self.dtype, deterministic)
        config.finalize_model_grads_func = _finalize_summed_grads
        self.model: PolicyModel = build_model(self.arch, config, self.groups).to(self.device)
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=self.mesh.distributed_optimizer
            ),
            self.model,
            pg_collection=self.groups,
        )

    def _load_weights(self, folder: str | Path) -> None:
        load_weights(
            self.model,
            SafetensorsFolder(folder),
            self.arch,
            self.groups.pp.rank(),
            self.groups.pp.size(),
            self.groups.tp.rank(),
            self.groups.tp.size(),
        )

    def load_hf(self, folder: str | Path) -> None:
        """Load other weights of the same architecture; the optimizer starts anew.

        Raises ConfigError where the folder holds another architecture.
        """
        if architecture(read_config(folder)) != self.arch:
            raise ConfigError([f"model.path: {folder} holds another architecture than the running shards"])
        self._load_weights(folder)
        self.reset_optimizer(self.optimizer.settings)

    def reset_optimizer(self, settings: OptimizerSettings) -> None:
        """A new optimizer (moments, step and schedule) on the current parameters."""
        self.optimizer = PolicyOptimizer(
            settings, self.ddp, dtype=self.dtype, distributed=self.mesh.distributed_optimizer
        )

    def close(self) -> None:
        """Leave the mesh; the world stays joined, so that `setup` can build another mesh of its size."""
        destroy_process_groups()

    # ---------------------------------------- forward and backward

    @property
    def _reports(self) -> bool:
        """Whether this rank speaks for its data-parallel replica: tp rank 0 of the last stage."""
        last: bool = self.groups.pp.rank() == self.groups.pp.size() - 1
        return last and self.groups.tp.rank() == 0

    def _run(self, batch: PackedBatch, consume: Consume, forward_only: bool) -> list[dict[str, Tensor]]:
        """Run this rank's micro-batches through the pipeline. Returns the metrics of each micro-batch on the
        last stage, nothing elsewhere."""
        mine = batch.ranks[self.groups.dp.rank()]
        micros = [micro_batch(batch.rows, indices, self.device) for indices in mine]
        longest = max(micro.tokens for micro in micros)
        results: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, consume=consume),
            data_iterator=iter(micros),
            model=self.ddp,
            num_microbatches=len(micros),
            seq_length=longest,
            micro_batch_size=1,
            decoder_seq_length=longest,
            forward_only=forward_only,
        )
        return results

    def _forward(self, micros: Any, model: Any, consume: Consume) -> tuple[Tensor, Callable[..., Any]]:
        """megatron-core's forward step: (output, loss function of the output)."""
        micro: MicroBatch = next(micros)
        hidden = model(micro.ids, micro.positions, None, packed_seq_params=micro.packing)
        return hidden, partial(self._loss, micro, consume)

    def _loss(self, micro: MicroBatch, consume: Consume, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Loss of a micro-batch as megatron-core wants it: (sum, token count, metrics)."""
        count = torch.tensor(len(micro.taken), dtype=torch.int, device=hidden.device)
        if len(micro.taken) == 0:
            # Keeps the graph, so that every stage has a backward pass; adds exactly 0.
            return hidden.float().sum() * 0.0, count, {}
        logprobs, entropy = taken_log_probs(
            hidden[:, 0].index_select(0, micro.predicting),
            self.model.output_weight,
            micro.taken,
            micro.temperature,
            self.groups.tp,
        )
        loss, metrics = consume(micro, logprobs, entropy)
        return loss, count, {name: value.detach() for name, value in metrics.items()}

    def log_probs(self, batch: PackedBatch) -> list[Floats]:
        """Per row `[tokens]` float32, 0 outside actions; the same on every rank. Collective."""
        check_batch(batch, self.mesh.dp)
        scored: dict[int, Floats] = {}

        def keep(micro: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            scored.update(scatter_log_probs(batch.rows, micro.rows, logprobs.float().cpu().numpy()))
            return logprobs.sum(), {}

        with torch.no_grad():
            self._run(batch, keep, forward_only=True)
        everywhere = _gather_objects(scored if self._reports else {})
        merged = {index: values for part in everywhere for index, values in part.items()}
        return [merged.get(i, np.zeros(len(row), np.float32)) for i, row in enumerate(batch.rows)]

    def train_step(self, batch: PackedBatch, loss: LossSpec) -> TrainMetrics:
        """Forward, backward and one optimizer step over the whole batch; global figures on every rank.

        The loss function's sums are never rescaled here: the core has put every denominator into
        `loss_weight`. A non-finite loss or gradient norm leaves parameters and optimizer as they were.
        """
        check_batch(batch, self.mesh.dp)
        function = LOSSES.get(loss.name)

        def consume(micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = function(logprobs, entropy, micro.streams, loss.settings)
            return value, {**metrics, "loss": value}

        self.optimizer.zero_grad()
        results = self._run(batch, consume, forward_only=False)
        metrics = reduce_metrics(_gather_objects(_as_floats(results) if self._reports else []))
        total = metrics.pop("loss", 0.0)
        norm, rate, applied = self.optimizer.step(finite=math.isfinite(total))
        return TrainMetrics(loss=total, grad_norm=norm, learning_rate=rate, applied=applied, extra=metrics)

    # ---------------------------------------- weights and checkpoints

    def export(
        self, version: int, put: Callable[[Bucket], Any] = lambda bucket: bucket
    ) -> WeightExport | None:
        """All weights as Hugging Face tensors on global rank 0, None elsewhere; `put` makes the handles."""
        return export_weights(
            self.model,
            self.arch,
            self.groups,
            version=version,
            bucket_bytes=self.trainer.bucket_mib * 2**20,
            put=put,
        )

    def begin_save(self, folder: Path, *, fully_parallel: bool = True) -> None:
        """Start to write parameters, optimizer, schedule and random state as they are now; training may go
        on. Raises CheckpointError where the last save was not finished."""
        if self._saving is not None:
            raise CheckpointError(f"{self._saving.folder} is still being written")
        self._saving = begin_save(
            folder, self.model, self.optimizer, self.mesh, self.groups, fully_parallel=fully_parallel
        )

    def save_written(self) -> bool:
        """Whether this rank has written its part of the save under way. Not collective."""
        return self._saving is None or self._saving.written()

    def finish_save(self) -> None:
        """Complete the save under way; its folder has no commit marker yet."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def save(self, folder: Path, *, fully_parallel: bool = True) -> None:
        """`begin_save` and `finish_save`."""
        self.begin_save(folder, fully_parallel=fully_parallel)
        self.finish_save()

    def load(self, folder: Path, *, fully_parallel: bool = True) -> None:
        """Continue from a checkpoint, also of another mesh. Raises CheckpointError where it does not fit."""
        self.reset_optimizer(read_optimizer_settings(folder, self.mesh))
        load_checkpoint(
            folder, self.model, self.optimizer, self.mesh, self.groups, fully_parallel=fully_parallel
        )


def _finalize_summed_grads(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients over the mesh as sums: without a token count megatron-core divides by nothing."""
    finalize_model_grads(model, None, **kwargs)


def _seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    # A few kernels have no deterministic form; they warn instead of failing.
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def _gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _as_floats(results: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in result.items()} for result in results]


def reduce_metrics(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Over all micro-batches of all ranks: the maximum of names that start with `max_`, the sum of others."""
    values: dict[str, list[float]] = defaultdict(list)
    for results in ranks:
        for result in results:
            for name, value in result.items():
                values[name].append(value)
    return {
        name: max(series, key=lambda x: math.inf if math.isnan(x) else x)
        if name.startswith("max_")
        else math.fsum(series)
        if all(map(math.isfinite, series))
        else math.nan
        for name, series in values.items()
    }
