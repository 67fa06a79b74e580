"""A line of talk as token ids, and what its next step takes over from an earlier one.

The context of the next action is described as contracts.Step describes it: what is kept of the step before,
and what is new. An observation that is appended keeps everything; one that rewrites the conversation keeps
the longest common beginning, so that a fork stores only what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_agent.contracts import Ids, Message, Observation
from rollout.chat import ChatTokens


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of ids at the start in which both agree."""
    shorter = min(len(left), len(right))
    differing = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differing[0]) if len(differing) else shorter


class Conversation:
    """An episode has one, or several where agents with contexts of their own play it together."""

    def __init__(self, chat: ChatTokens) -> None:
        self.ids: Ids = np.zeros(0, np.int32)
        """`[tokens]` int32: everything so far; ends with an action, or with what was observed after it."""
        self.last: int | None = None
        """The step that the next one continues; None before the first."""
        self.kept = 0
        """Ids that are those of `last`; the rest is new."""
        self._chat = chat
        self._last_full = 0
        """Length of the context + action of `last`."""
        self._tools: tuple[Mapping[str, Any], ...] = ()

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Make `messages` the whole conversation; `tools` are shown until the end of the episode."""
        self._tools = tuple(tools)
        played, self.ids = self.ids[: self._last_full], self._chat.open_ids(messages, self._tools)
        self.kept = common_prefix(played, self.ids)

    def observe(self, observation: Observation) -> None:
        """Append the observation to the conversation, or put it in the conversation's place."""
        if observation.rewrite:
            self.open(observation.messages, observation.tools or self._tools)
        else:
            self.ids = np.concatenate([self.ids, self._chat.continue_ids(observation.messages)])

    @property
    def new_ids(self) -> Ids:
        """What the next step has to store of its context."""
        return self.ids[self.kept :]

    @property
    def appended(self) -> Ids | None:
        """What was observed after the last action, if it only appended to it; else None."""
        return self.new_ids if len(self.new_ids) and self.kept == self._last_full else None

    def go_on(self, step: int, action_ids: Ids) -> None:
        """Take over the action that step `step` answered the current context with."""
        self.last = step
        self.ids = np.concatenate([self.ids, action_ids])
        self.kept = self._last_full = len(self.ids)
