"""Token ids of conversations, from a Hugging Face tokenizer and its jinja chat template.

What the policy sampled is never decoded and encoded again. A conversation goes on with ids that follow the
action's stop token: the template is rendered with and without the appended messages after a stand-in for the
action, and only the difference is encoded. That needs a template that appends, i.e. one that does not
rewrite earlier turns when later ones arrive; every new rendering is checked for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_agent.contracts import Ids, Message
from megatron_agent.errors import MegatronAgentError

CACHED_RENDERS = 8192
STAND_IN = "-"
"""Content of the stand-in for an action."""
QUESTION: Message = {"role": "user", "content": "-"}
ANSWER: Message = {"role": "assistant", "content": STAND_IN}


class TemplateError(MegatronAgentError):
    """A chat template that cannot carry a token-exact conversation."""


class ChatTokens:
    """Tokenizer and chat template of one model folder. Raises TemplateError where they break the rules."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        self.folder = str(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise TemplateError(f"{self.folder} has no chat template")
        self._head = self._conversation_head()
        self.stop_token_ids: tuple[int, ...] = self._stop_token_ids()
        """Ids that end an assistant turn; the template's own comes first."""
        self._open = self._cached(self._encode_opening)
        self._continue = self._cached(self._encode_continuation)

    def open_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """`[tokens]` int32, read-only: the conversation and the prompt for the assistant's turn."""
        return self._open(json.dumps([list(messages), list(tools)], default=dict))

    def continue_ids(self, messages: Sequence[Message]) -> Ids:
        """`[tokens]` int32, read-only: what follows the stop token of an assistant turn when `messages` are
        appended, up to and with the prompt for the next assistant turn. Raises TemplateError where the
        template does not append."""
        return self._continue(json.dumps(list(messages), default=dict))

    def encode(self, text: str) -> Ids:
        """`[tokens]` int32, without added begin or end tokens; special tokens in `text` are recognised."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode_action(self, ids: Sequence[int] | Ids) -> str:
        """Text of an action: special tokens kept, the stop token at its end cut."""
        kept = [int(token) for token in ids]
        if kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return str(
            self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    # ------------------------------------ rendering

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            raise TemplateError(f"the chat template of {self.folder} fails: {error}") from error
        return str(text)

    def _encode_opening(self, key: str) -> Ids:
        messages, tools = json.loads(key)
        return self.encode(self._render(messages, tools, prompt=True))

    def _encode_continuation(self, key: str) -> Ids:
        messages = json.loads(key)
        text = self._render([QUESTION, ANSWER, *messages], prompt=True)
        if not text.startswith(self._head):
            roles = [message.get("role") for message in messages]
            raise TemplateError(
                f"the chat template of {self.folder} rewrites an earlier assistant turn when {roles} "
                "messages follow it: the ids that the policy sampled could not be kept"
            )
        ids = self.encode(text[len(self._head) :])
        if not np.array_equal(np.concatenate([self.encode(self._head), ids]), self.encode(text)):
            raise TemplateError(
                f"the tokenizer of {self.folder} encodes text after a stop token differently when it stands "
                "alone: a conversation cannot be continued token by token"
            )
        return ids

    def _conversation_head(self) -> str:
        """A rendered question and stand-in answer up to the end of the answer's stop token."""
        text = self._render([QUESTION, ANSWER], prompt=False)
        opening = self._render([QUESTION], prompt=True)
        if not text.startswith(opening + STAND_IN):
            raise TemplateError(
                f"the chat template of {self.folder} puts something between its generation prompt and the "
                "assistant's content: a sampled turn and a rendered one would differ"
            )
        rest = text[len(opening) + len(STAND_IN) :]
        stop = next((token for token in self._tokenizer.all_special_tokens if rest.startswith(token)), "")
        if not stop:
            raise TemplateError(
                f"the chat template of {self.folder} ends an assistant turn with no special token"
            )
        return opening + STAND_IN + stop

    def _stop_token_ids(self) -> tuple[int, ...]:
        """The template's stop token, then the model's end-of-sequence ids."""
        ids = [int(self.encode(self._head)[-1])]
        if self._tokenizer.eos_token_id is not None:
            ids.append(int(self._tokenizer.eos_token_id))
        generation = Path(self.folder) / "generation_config.json"
        if generation.is_file():
            more = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
            ids += [more] if isinstance(more, int) else more or []
        return tuple(dict.fromkeys(ids))

    @staticmethod
    def _cached(function: Callable[[str], Ids]) -> Callable[[str], Ids]:
        """Cache by key; the arrays are shared, so they are read-only."""

        def read_only(key: str) -> Ids:
            ids = function(key)
            ids.flags.writeable = False
            return ids

        return lru_cache(CACHED_RENDERS)(read_only)
