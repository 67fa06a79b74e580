"""One of two tp ranks of the log-prob kernel: its shard of the vocabulary against the whole one, in fp64."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import harness


def main() -> None:
    import torch
    import torch.distributed as dist

    from parallel.logprob import taken_log_probs

    rank, world, port, folder, _ = harness.rank_arguments()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    taken = torch.randint(0, 50, (37,), generator=generator)
    temperature = torch.rand(37, dtype=torch.float64, generator=generator) + 0.5
    upstream = torch.randn(37, dtype=torch.float64, generator=generator)
    mine = weight.chunk(world)[rank].clone().requires_grad_()
    logprobs, entropy = taken_log_probs(hidden, mine, taken, temperature, dist.group.WORLD, chunk_tokens=8)
    (logprobs * upstream).sum().backward()

    plain = hidden.detach().clone().requires_grad_()
    full = weight.clone().requires_grad_()
    table = torch.log_softmax(plain @ full.T / temperature[:, None], dim=-1)
    want = table.gather(1, taken[:, None])[:, 0]
    (want * upstream).sum().backward()
    pairs = {
        "logprob": (logprobs, want),
        "entropy": (entropy, -(table.exp() * table).sum(dim=-1)),
        "grad_hidden": (hidden.grad, plain.grad),
        "grad_weight": (mine.grad, full.grad.chunk(world)[rank]),
    }
    gaps = {name: float((a - b).detach().abs().max()) for name, (a, b) in pairs.items()}
    everywhere: list[dict[str, float]] = [{} for _ in range(world)]
    dist.all_gather_object(everywhere, gaps)
    harness.write_result(rank, folder, {name: max(part[name] for part in everywhere) for name in gaps})


if __name__ == "__main__":
    harness.run_rank(main)
