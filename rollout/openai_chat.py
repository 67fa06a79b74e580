"""Chat mode: a server that knows messages and tools, but no token ids, played by the same flows.

A flow hands token ids over. `RecordedChat` remembers which messages each piece of them was rendered from, so
that the conversation can be told to the server as messages. What the server answers is written in the hermes
form and encoded, which gives the flow ids to parse. Those ids are not what the policy sampled: the log-probs
are NaN and the version is none, so that no trainer takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_agent.contracts import FinishReason, Generation, Ids, Message, Sampling
from rollout.chat import ChatTokens
from rollout.openai_client import NO_VERSION, ApiEngine

UNANSWERED = "not executed"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}},
}


class RecordedChat(ChatTokens):
    """ChatTokens that remembers what it rendered."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.openings: dict[bytes, tuple[list[Message], list[Mapping[str, Any]]]] = {}
        self.continuations: dict[bytes, list[Message]] = {}

    def open_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        ids = super().open_ids(messages, tools)
        self.openings[ids.tobytes()] = (list(messages), list(tools))
        return ids

    def continue_ids(self, messages: Sequence[Message]) -> Ids:
        ids = super().continue_ids(messages)
        self.continuations[ids.tobytes()] = list(messages)
        return ids


@dataclass(frozen=True, slots=True)
class Told:
    """A conversation as the server knows it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]


class ChatApiEngine(ApiEngine):
    """EngineClient of a server that takes and returns messages."""

    def __init__(self, address: str, chat: RecordedChat, **options: Any) -> None:
        super().__init__(address, **options)
        self._chat = chat
        self._played: dict[bytes, Told] = {}
        """Conversations that end with an answer of the server, by their ids."""
        self._lengths: set[int] = set()

    async def check_messages(self) -> None:
        """Prove, before anything is played, that the server answers messages with tools. Raises EngineError,
        with the server's own words, where it does not."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "-"}],
            "tools": [PROBE_TOOL],
            "max_tokens": 1,
        }
        self._message(await self._call("POST", "/chat/completions", body, "request probe"), "request probe")

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Ask for the next assistant message. Raises EngineError, or DeadlineExceeded after `timeout_s`."""
        context, cause = np.asarray(ids, np.int32), f"request {request_id}"
        told = self._conversation(context, cause)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(told.messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        body |= {"tools": list(told.tools)} if told.tools else {}
        body |= {"seed": sampling.seed} if sampling.seed is not None else {}
        answer = await self._call("POST", "/chat/completions", body, cause)
        message, reason = self._message(answer, cause)
        action = self._action(message, reason)
        full = np.concatenate([context, action])
        self._played[full.tobytes()] = Told((*told.messages, message), told.tools)
        self._lengths.add(len(full))
        return Generation(
            ids=action,
            logprobs=np.full(len(action), math.nan, np.float32),
            versions=np.full(len(action), NO_VERSION, np.int32),
            finish_reason=reason,
            engine=self.name,
        )

    def _conversation(self, context: Ids, cause: str) -> Told:
        """The messages behind `context`."""
        opening = self._chat.openings.get(context.tobytes())
        if opening is not None:
            return Told(tuple(opening[0]), tuple(opening[1]))
        for length in sorted(self._lengths, reverse=True):
            told = self._played.get(context[:length].tobytes()) if length < len(context) else None
            appended = self._chat.continuations.get(context[length:].tobytes()) if told else None
            if told and appended is not None:
                return Told((*told.messages, *answered(told.messages[-1], appended)), told.tools)
        raise self._error(cause, "its context is not made of messages: this flow needs eval.api_mode=tokens")

    def _message(self, answer: Any, cause: str) -> tuple[Message, FinishReason]:
        """The assistant's message, and whether it was cut."""
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise self._error(cause, "its answer has no message")
        kept: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            kept["tool_calls"] = message["tool_calls"]
        cut = choice.get("finish_reason") == "length"
        return kept, FinishReason.LENGTH if cut else FinishReason.STOP

    def _action(self, message: Message, reason: FinishReason) -> Ids:
        calls = [hermes(call.get("function") or {}) for call in message.get("tool_calls", ())]
        text = "\n".join(part for part in (str(message["content"]), *calls) if part)
        ids = self._chat.encode(text)
        if reason is FinishReason.STOP:
            ids = np.append(ids, np.int32(self._chat.stop_token_ids[0]))
        return ids.astype(np.int32, copy=False)


def hermes(function: Mapping[str, Any]) -> str:
    """A call as the flows' parser reads it. Arguments that are no JSON stay as they are: the parser tells."""
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return (
        f'<tool_call>\n{{"name": {json.dumps(function.get("name", ""))}, "arguments": {text}}}\n</tool_call>'
    )


def answered(assistant: Message, messages: Sequence[Message]) -> list[Message]:
    """`messages` as the answer to `assistant`: tool messages name the calls in turn, every call is answered,
    and what answers no call is a message of the user."""
    calls = [str(call.get("id", "")) for call in assistant.get("tool_calls", ())]
    answers: list[Message] = []
    rest: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and calls:
            answers.append({**message, "tool_call_id": calls.pop(0)})
        elif message["role"] == "tool":
            rest.append({"role": "user", "content": message["content"]})
        else:
            rest.append(message)
    answers += [{"role": "tool", "tool_call_id": call, "content": UNANSWERED} for call in calls]
    return answers + rest
