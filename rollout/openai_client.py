"""Engines behind an OpenAI-compatible HTTP API, as clients that flows play with like with any other.

Token mode, here: token ids in, token ids and log-probs out, as vLLM servers give them over `/completions`, so
that environments, flows and figures are those of an engine of our own. Log-probs are what the server reports.
`rollout.openai_chat` holds the chat mode, for servers that know messages only.

Rules:
- Every request ends in an answer, in EngineError, or in DeadlineExceeded after `timeout_s` over all tries.
- What may pass is tried again with growing pauses: 408, 425, 429, 5xx and broken connections. Everything else
  fails at once with the server's own message.
- An answer that is not exactly what was asked for (ids missing, another prompt) is an error, never guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from megatron_agent.contracts import FinishReason, Generation, Sampling, WeightManifest
from megatron_agent.errors import EngineError
from megatron_agent.waiting import waiting_for
from rollout.chat import ChatTokens

log = logging.getLogger(__name__)

PASSING = frozenset((408, 425, 429))
NOT_SERVED = frozenset((400, 404, 405, 422, 501))
CONNECT_S = 10.0
HEALTH_S = 10.0
LONGEST_PAUSE_S = 30.0
NO_VERSION = -1
"""Weight version of a policy that is not ours."""
PROBE = "<|im_start|>user\nIs 417 > 82? \u201cOui\u201d, naïve.\n"
"""Text on which tokenizers differ: special tokens, digits, bytes beyond ASCII."""
FULL_DISTRIBUTION = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent with every request: a server takes what is left out from the model's generation config."""


class NotServed(EngineError):
    """The server does not know what was asked for."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and after what pauses, a request is tried again."""

    tries: int = 5
    first_pause_s: float = 0.5

    def pause_s(self, tried: int, asked_s: float | None) -> float:
        """Seconds before the next try, after `tried` of them; `asked_s` is what the server asked for."""
        grown = self.first_pause_s * 2.0 ** (tried - 1) * random.Random().uniform(0.5, 1.0)
        return min(max(grown, asked_s or 0.0), LONGEST_PAUSE_S)


class ApiEngine(ABC):
    """What both modes share: the connection, and a policy whose weights are not ours to update."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        api_key: str = "",
        timeout_s: float = 300.0,
        requests_at_once: int = 64,
        retry: Retry | None = None,
    ) -> None:
        """`model`: what the server is asked for; without it, the first that it lists."""
        self.address = address.rstrip("/")
        self.name = self.address
        self.model = model
        self._timeout_s = timeout_s
        self._retry = retry or Retry()
        self._running = 0
        self._places = asyncio.Semaphore(requests_at_once)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # The deadline is that of `waiting_for`.
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            # A proxy of the environment knows nothing of servers on this machine.
            trust_env=httpx.URL(self.address).host not in ("localhost", "127.0.0.1", "::1"),
            limits=httpx.Limits(max_connections=requests_at_once + 1),
        )

    async def connect(self, *, max_context_tokens: int) -> None:
        """Find the model. Raises EngineError where the server cannot be used, and says what to do."""
        try:
            listed = (await self._call("GET", "/models", None, "list of models"))["data"]
            served = {str(entry["id"]): entry for entry in listed}
        except NotServed as error:
            raise EngineError(f"{error}; an address ends where the API begins, often in /v1") from error
        except (KeyError, TypeError) as error:
            raise self._error("list of models", "it is not that of an OpenAI-compatible server") from error
        if not served:
            raise self._error("list of models", "it is empty")
        self.model = self.model or next(iter(served))
        if self.model not in served:
            raise EngineError(
                f"server {self.name} has no model {self.model!r}, it has {', '.join(sorted(served))}"
            )
        longest = served[self.model].get("max_model_len")
        if isinstance(longest, int) and longest < max_context_tokens:
            raise EngineError(
                f"server {self.name} reads at most {longest} tokens: set rollout.max_context_tokens={longest}"
            )

    @abstractmethod
    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """As the port. Raises EngineError, or DeadlineExceeded after `timeout_s`."""

    async def begin_update(self, manifest: WeightManifest) -> None:
        raise self._no_update()

    async def receive_bucket(self, version: int, index: int, handle: Any) -> None:
        raise self._no_update()

    async def commit_update(self, version: int) -> None:
        raise self._no_update()

    async def health(self) -> Mapping[str, Any]:
        state: dict[str, Any] = {"version": NO_VERSION, "running": self._running}
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._once("GET", "/models", None, "health")
        except (EngineError, TimeoutError, httpx.TransportError) as error:
            return state | {"alive": False, "detail": str(error)}
        return state | {"alive": True}

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------ requests

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, cause: str) -> Any:
        """The JSON that the server answers. `path` goes below the address, unless it is a whole URL."""
        async with self._places:
            self._running += 1
            try:
                async with waiting_for(f"server {self.name}", cause, self._timeout_s):
                    return await self._tried(method, path, body, cause)
            finally:
                self._running -= 1

    async def _tried(self, method: str, path: str, body: Mapping[str, Any] | None, cause: str) -> Any:
        for tried in range(1, self._retry.tries + 1):
            asked_s = None
            try:
                response = await self._once(method, path, body, cause)
                if response.status_code not in PASSING and response.status_code < 500:
                    return self._json(response, cause)
                failure = told(response)
                with contextlib.suppress(ValueError):
                    asked_s = float(response.headers.get("retry-after", ""))
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
            if tried < self._retry.tries:
                log.info("server %s, %s: %s; trying again", self.name, cause, failure)
                await asyncio.sleep(self._retry.pause_s(tried, asked_s))
        raise self._error(cause, f"{failure} ({self._retry.tries} tries)")

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, cause: str
    ) -> httpx.Response:
        """One try. Raises NotServed and EngineError for an answer that another try would not change."""
        url = path if "://" in path else self.address + path
        response = await self._http.request(method, url, json=body)
        if response.status_code in NOT_SERVED:
            raise NotServed(str(self._error(cause, told(response))))
        if 300 <= response.status_code < 500 and response.status_code not in PASSING:
            hint = " (the key is read from OPENAI_API_KEY)" if response.status_code == 401 else ""
            raise self._error(cause, told(response) + hint)
        return response

    def _json(self, response: httpx.Response, cause: str) -> Any:
        try:
            answer = response.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._error(cause, f"its answer is not JSON ({error})") from error
        if not isinstance(answer, dict):
            raise self._error(cause, f"its answer is not a JSON object but {str(answer)[:80]!r}")
        return answer

    def _error(self, cause: str, what: str) -> EngineError:
        return EngineError(f"server {self.name}, {cause}: {what}")

    def _no_update(self) -> EngineError:
        return EngineError(f"server {self.name}: its weights cannot be updated from here")


class TokenApiEngine(ApiEngine):
    """EngineClient of a server that takes and returns token ids."""

    async def check_tokens(self, chat: ChatTokens) -> None:
        """Prove that the server speaks in token ids, and in those of `chat`. Raises EngineError where not."""
        ids = chat.encode(PROBE).tolist()
        try:
            await self.generate(ids, Sampling(temperature=0.0, max_new_tokens=1), request_id="probe")
        except NotServed as error:
            raise EngineError(
                f"{error}; it takes no token ids: serve the model with vLLM, or use eval.api_mode=chat"
            ) from error
        root = self.address.removesuffix("/v1")
        body = {"model": self.model, "prompt": PROBE, "add_special_tokens": False}
        try:
            answer = await self._call("POST", f"{root}/tokenize", body, "tokenizer")
        except NotServed:
            log.warning(
                "server %s has no /tokenize: its tokenizer is taken to be that of %s", self.name, chat.folder
            )
            return
        if answer.get("tokens") != ids:
            raise EngineError(
                f"server {self.name}: its tokenizer is not that of {chat.folder}: set model.path to the "
                f"folder of the model that it serves ({self.model})"
            )

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, request_id: str) -> Generation:
        """Sample after `ids`. Raises EngineError, or DeadlineExceeded after `timeout_s`."""
        prompt = [int(token) for token in ids]
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **FULL_DISTRIBUTION,
        }
        cause = f"request {request_id}"
        answer = await self._call("POST", "/completions", body, cause)
        return self._generation(answer, prompt, cause)

    def _generation(self, answer: Any, prompt: Sequence[int], cause: str) -> Generation:
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict) or not choice:
            raise self._error(cause, "its answer has no choices")
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise self._error(
                cause,
                "it does not return token ids (choices[0].token_ids): serve the model with vLLM, or use "
                "eval.api_mode=chat",
            )
        if choice.get("prompt_token_ids", prompt) not in (None, prompt):
            raise self._error(cause, "it read another prompt than the one that was sent")
        reason = choice.get("finish_reason")
        if reason not in set(FinishReason):
            raise self._error(cause, f"ended with {reason!r}")
        return Generation(
            ids=np.asarray(ids, np.int32),
            logprobs=self._logprobs(choice, len(ids), cause),
            versions=np.full(len(ids), NO_VERSION, np.int32),
            finish_reason=FinishReason(reason),
            engine=self.name,
        )

    def _logprobs(self, choice: Mapping[str, Any], count: int, cause: str) -> Any:
        """`[count]` float32, NaN where the server gives none."""
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if values is None:
            return np.full(count, math.nan, np.float32)
        if len(values) != count:
            raise self._error(cause, f"{len(values)} log-probs for {count} tokens")
        return np.asarray([math.nan if value is None else value for value in values], np.float32)


def told(response: httpx.Response) -> str:
    """Status and message of an error, on one line."""
    message = response.text
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        body = response.json()
        error = body.get("error", body)
        message = error["message"] if isinstance(error, dict) else error
    return f"HTTP {response.status_code} {' '.join(str(message).split())[:300]}".rstrip()
