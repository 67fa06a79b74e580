"""What makes two samples the same task instance, whatever they are called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from megatron_agent.contracts import Sample
from megatron_agent.data.problems import MAX_LINES


def content_id(sample: Sample) -> str:
    """Digest of what is played and how it is rewarded: prompt, environment with its arguments and seed,
    reward model. Id, split and the fields that only describe are no part of it."""
    reward_model = None if sample.reward_model is None else dict(sample.reward_model)
    content = [list(sample.prompt), sample.env_name, dict(sample.env_kwargs), reward_model, sample.seed]
    text = json.dumps(content, sort_keys=True, default=dict)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def shared(train: Sequence[Sample], heldout: Iterable[Sample]) -> list[str]:
    """A line for every held-out sample that is a training sample too, by content or by id."""
    by_content = {content_id(sample): sample.id for sample in train}
    ids = {sample.id for sample in train}
    found = []
    for sample in heldout:
        twin = by_content.get(content_id(sample), sample.id if sample.id in ids else None)
        if twin is not None:
            found.append(
                f"held-out sample {sample.id!r} is training sample {twin!r}, "
                "allowed: splits that share nothing"
            )
    if len(found) > MAX_LINES:
        found = [*found[:MAX_LINES], f"and {len(found) - MAX_LINES} more samples of both splits"]
    return found
