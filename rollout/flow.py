"""Agent flows: how one attempt at a sample is played, with any EngineClient: no Ray, no vLLM here.

`AgentFlow.run` owns what every flow must get right: the environment is closed exactly once, an exception of
the environment or the engine becomes a typed outcome, and the steps played until then are kept. A flow of
your own overrides `converse` and is registered with `megatron_agent.register_flow`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from megatron_agent.contracts import (
    AgentInvalid,
    Completed,
    EngineFailed,
    EnvFailed,
    EnvStage,
    EnvStep,
    Outcome,
    Sample,
    Sampling,
    Trajectory,
    TruncationReason,
)
from megatron_agent.errors import EngineError
from megatron_agent.ports import AgentEnv, EngineClient
from megatron_agent.registries import register_flow
from megatron_agent.settings import RolloutSettings
from megatron_agent.waiting import DeadlineExceeded
from rollout.chat import ChatTokens
from rollout.episode import Attempt, EnvironmentFault, Episode

log = logging.getLogger(__name__)


class AgentFlow(ABC):
    """One way to play samples; an instance serves many episodes at once and keeps no state of any."""

    def __init__(self, chat: ChatTokens, settings: RolloutSettings) -> None:
        self.chat = chat
        self.settings = settings

    @abstractmethod
    async def converse(self, episode: Episode) -> Outcome:
        """Play `episode` to its end and say how it ended. Let its exceptions pass."""

    async def run(
        self,
        sample: Sample,
        env: AgentEnv,
        engine: EngineClient,
        *,
        sampling: Sampling,
        attempt_id: str,
        group_id: str,
        seed: int | None = None,
    ) -> Trajectory:
        """Play one attempt and close `env`. Raises nothing but cancellation.

        `sampling` takes the chat template's stop tokens where it names none. With `seed` (that of the run)
        every request samples with a seed of its own.
        """
        attempt = Attempt(id=attempt_id, group_id=group_id, sampling=sampling, seed=seed)
        episode = Episode(sample, env, engine, self.chat, self.settings, attempt)
        try:
            outcome = await self.converse(episode)
        except EnvironmentFault as fault:
            outcome = EnvFailed(fault.stage, fault.detail)
        except (EngineError, DeadlineExceeded) as error:
            outcome = EngineFailed(str(error))
        except Exception as error:
            log.exception("flow %s failed in attempt %s", type(self).__name__, attempt.id)
            outcome = EnvFailed(
                EnvStage.CRASH, f"flow {type(self).__name__}: {type(error).__name__}: {error}"
            )
        finally:
            await self._close(env, attempt)
        return episode.trajectory(outcome)

    async def _close(self, env: AgentEnv, attempt: Attempt) -> None:
        """A failure to close cannot change how the episode ended."""
        try:
            await env.close()
        except Exception:
            log.exception("environment %s did not close in attempt %s", type(env).__name__, attempt.id)


@register_flow("agent_env_loop")
class AgentEnvLoop(AgentFlow):
    """Observe, generate, act, until the environment or a limit ends the episode."""

    async def converse(self, episode: Episode) -> Outcome:
        observation = await episode.reset()
        episode.open((*episode.sample.prompt, *observation.messages), observation.tools)
        for _ in range(self.settings.max_turns):
            if episode.room < 1:
                return episode.truncate(TruncationReason.CONTEXT_LENGTH)
            outcome = await self.turn(episode)
            if outcome is not None:
                return outcome
        return episode.truncate(TruncationReason.MAX_TURNS)

    async def turn(self, episode: Episode) -> Outcome | None:
        """Generate one action and act on it: how the episode ended, or None where it goes on."""
        cut = await episode.generate()
        return follow(episode, await episode.act()) if cut is None else episode.truncate(cut)


def follow(episode: Episode, answer: EnvStep) -> Outcome | None:
    """Take in the environment's answer: how the episode ended, or None where it goes on."""
    if (outcome := ended(answer)) is not None:
        return outcome
    if answer.observation is not None:
        episode.observe(answer.observation)
    if answer.truncated is not None:
        return episode.truncate(answer.truncated)
    return None


def ended(answer: EnvStep) -> Outcome | None:
    """Whether the environment ended the episode. Raises EnvironmentFault for an answer that neither ends
    it nor says how it goes on."""
    if answer.invalid:
        return AgentInvalid(answer.invalid)
    if answer.terminated:
        return Completed()
    if answer.observation is None and answer.truncated is None:
        raise EnvironmentFault(EnvStage.STEP, "gave no observation and did not end the episode")
    return None
