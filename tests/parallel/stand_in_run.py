"""One rank that trains one step and saves, with one patch of the CPU stand-in left out (or `none`).

Prints the error it meets, or `trained`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import harness


def main() -> None:
    left_out, model, folder = sys.argv[1:4]
    from parallel import cpu_stand_in

    if left_out != "none":
        setattr(cpu_stand_in, left_out, lambda: None)
    try:
        train(model, folder)
        print("trained")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


def train(model: str, folder: str) -> None:
    from megatron_agent.settings import MeshSettings, ModelSettings, TrainerSettings
    from parallel.shard import PolicyShard

    harness.register_loss()
    shard = PolicyShard()
    shard.setup(
        0,
        "127.0.0.1",
        harness.free_port(),
        model_path=model,
        model=ModelSettings(path=model),
        mesh=MeshSettings(distributed_optimizer=True),
        trainer=TrainerSettings(),
        optimizer=harness.OPTIMIZER,
    )
    batch = harness.pack(harness.make_rows(), 1, 1)
    assert shard.train_step(batch, harness.LOSS).applied
    shard.save(Path(folder))
    shard.load(Path(folder))


if __name__ == "__main__":
    main()
