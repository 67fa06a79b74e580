"""`branching`: at every turn several candidate actions are sampled and the episode goes on from one of them.

The candidates of a turn are steps of the same trajectory. The first holds the observation; the others fork
from it where its action begins (`parent`, `prefix_len`), so that the context is stored once. Those that were
not taken are leaves: without a reward, marked by `taken = False`. The return of the attempt is that
of the path which was taken, and all its steps have the same claim on it, leaves included: what is trained
is the agent that samples several actions and takes one by a fixed rule, and the gradient of its expected
return sums over everything that it sampled. Training the taken actions alone would be training on samples
that the rule has selected.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from megatron_agent.contracts import Outcome, Parse
from megatron_agent.registries import register_flow
from rollout.episode import Candidate, Episode
from rollout.flow import AgentEnvLoop, follow


class BranchingFlow(AgentEnvLoop):
    """The loop of `agent_env_loop` with a choice at each turn. Override `choose` for a rule of your own."""

    candidates: ClassVar[int] = 4
    """Actions sampled at each turn; one in greedy evaluation, where all would be the same."""

    @abstractmethod
    async def choose(self, episode: Episode, candidates: Sequence[Candidate]) -> Candidate:
        """The one to go on from, of at least one candidate. None of them was cut by a limit."""

    async def turn(self, episode: Episode) -> Outcome | None:
        sampled = await episode.sample_actions(1 if episode.greedy else self.candidates)
        whole = [candidate for candidate in sampled if candidate.cut is None]
        chosen = await self.choose(episode, whole) if whole else sampled[0]
        episode.take(chosen, sampled)
        cut = chosen.cut
        return follow(episode, await episode.act()) if cut is None else episode.truncate(cut)


@register_flow("branching")
class FirstThatParses(BranchingFlow):
    """Takes the first candidate without a malformed tool call; the first of all where there is none."""

    async def choose(self, episode: Episode, candidates: Sequence[Candidate]) -> Candidate:
        parses = [episode.read(candidate.step).parse for candidate in candidates]
        sound = (c for c, parse in zip(candidates, parses, strict=True) if parse is not Parse.ERROR)
        return next(sound, candidates[0])


@register_flow("branching_by_reward")
class BestRehearsal(BranchingFlow):
    """Tries every candidate in the environment, puts the environment back each time, and takes the first of
    those with the highest reward. Needs an environment with `snapshot` and `restore`. What a leaf earned
    is in its `info["rehearsed_reward"]`; it is not part of the return."""

    async def choose(self, episode: Episode, candidates: Sequence[Candidate]) -> Candidate:
        answers = [await episode.rehearse(candidate.step) for candidate in candidates]
        worth = [(not answer.invalid, answer.reward or 0.0) for answer in answers]
        return candidates[worth.index(max(worth))]
