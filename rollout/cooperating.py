"""`cooperating_agents`: a planner and a worker play one episode, each in a conversation of its own.

The planner sees the task and writes a plan; the worker sees the task, its tools and the plan, and acts. After
`turns_per_plan` actions the planner reads what the environment said, and its next plan goes to the worker.
One policy plays both under different instructions. The trajectory has two roots, and `info["role"]` of a step
says whose it is. The environment rewards the worker's steps; the return is that of the attempt, and the steps
of both agents share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from megatron_agent.contracts import Message, Observation, Outcome, TruncationReason
from megatron_agent.registries import register_flow
from rollout.conversation import Conversation
from rollout.episode import Episode
from rollout.flow import AgentFlow, ended

NOTHING = Observation(messages=())


@register_flow("cooperating_agents")
class CooperatingAgents(AgentFlow):
    """Plan, act, report, plan again, until the environment or a limit ends the episode. `rollout.max_turns`
    counts the worker's actions."""

    planner: ClassVar[str] = "You plan. Say in one sentence what the worker does next."
    """What the planner's system message says after the task's own."""
    worker: ClassVar[str] = "You work. Follow the plan."
    turns_per_plan: ClassVar[int] = 2

    async def converse(self, episode: Episode) -> Outcome:
        start = await episode.reset()
        task = (*episode.sample.prompt, *start.messages)
        planner = episode.conversation()
        planner.open(instructed(task, self.planner))
        unseen = Observation(messages=instructed(task, self.worker), tools=start.tools, rewrite=True)
        report: list[Message] = []
        reason = TruncationReason.MAX_TURNS
        for turn in range(self.settings.max_turns):
            if turn % self.turns_per_plan == 0:
                if turn:
                    planner.observe(as_report(report))
                    report = []
                cut = await self._speak(episode, planner, "planner")
                if cut is not None:
                    return episode.truncate(cut, planner)
                plan = episode.read(planner.last, calls=False).content
            if unseen.rewrite or turn % self.turns_per_plan == 0:
                unseen = with_plan(unseen, plan)
            episode.observe(unseen)
            cut = await self._speak(episode, episode.main, "worker")
            if cut is not None:
                return episode.truncate(cut)
            answer = await episode.act()
            if (outcome := ended(answer)) is not None:
                return outcome
            unseen = answer.observation or NOTHING
            report += since_last_action(unseen.messages)
            if unseen.rewrite:  # the environment knows nothing of roles
                unseen = replace(unseen, messages=instructed(unseen.messages, self.worker))
            if answer.truncated is not None:
                reason = answer.truncated
                break
        if unseen.messages:
            episode.observe(unseen)
        return episode.truncate(reason)

    async def _speak(
        self, episode: Episode, conversation: Conversation, role: str
    ) -> TruncationReason | None:
        if episode.room_in(conversation) < 1:
            return TruncationReason.CONTEXT_LENGTH
        return await episode.generate(conversation, info={"role": role})


def instructed(messages: Sequence[Message], instruction: str) -> tuple[Message, ...]:
    """`messages` whose system message ends with `instruction`."""
    if messages and messages[0]["role"] == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n{instruction}"}
        return (system, *messages[1:])
    return ({"role": "system", "content": instruction}, *messages)


def with_plan(observation: Observation, plan: str) -> Observation:
    """The observation with the plan after it. A user's message takes it in, because some chat templates
    refuse two in a row."""
    *before, last = observation.messages or ({"role": "user", "content": ""},)
    if last["role"] == "user":
        messages = (*before, {**last, "content": f"{last['content']}\nPlan: {plan}".lstrip()})
    else:
        messages = (*before, last, {"role": "user", "content": f"Plan: {plan}"})
    return replace(observation, messages=messages)


def since_last_action(messages: Sequence[Message]) -> list[Message]:
    """What an observation says after the last assistant's turn in it: of a rewritten context, the end."""
    acted = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[acted[-1] + 1 if acted else 0 :])


def as_report(messages: Sequence[Message]) -> Observation:
    """What the worker was told, as the planner reads it."""
    text = "\n".join(str(message["content"]) for message in messages)
    return Observation(messages=({"role": "user", "content": f"Report: {text}"},))
