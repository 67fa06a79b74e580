"""`single_step`: one answer, judged. Reinforcement learning with verifiable rewards, without tools.

The whole text is the answer, whatever it looks like: nothing is parsed as a call, and the environment sees it
as the action's content. An environment that asks for another turn is cut off (Truncated: max_turns).
"""

from __future__ import annotations

from megatron_agent.contracts import Outcome, TruncationReason
from megatron_agent.registries import register_flow
from rollout.episode import Episode
from rollout.flow import AgentFlow, follow


@register_flow("single_step")
class SingleStep(AgentFlow):
    """Observe, answer, be judged."""

    async def converse(self, episode: Episode) -> Outcome:
        observation = await episode.reset()
        episode.open((*episode.sample.prompt, *observation.messages))
        if episode.room < 1:
            return episode.truncate(TruncationReason.CONTEXT_LENGTH)
        cut = await episode.generate()
        if cut is not None:
            return episode.truncate(cut)
        outcome = follow(episode, await episode.act(calls=False))
        return outcome or episode.truncate(TruncationReason.MAX_TURNS)
