"""A small HTTP server that behaves like vLLM's OpenAI-compatible one, and misbehaves when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.chat import ChatTokens

LOGPROB = -0.25


@dataclass
class Misdeed:
    """What the server does once in place of answering a POST."""

    status: int = 200
    body: str = ""
    headers: str = ""
    hang: bool = False
    drop: bool = False
    change: Callable[[dict[str, Any]], None] | None = None
    """Spoils the right answer."""


@dataclass
class ApiServer:
    """Completes with what `reply` says to the text of the prompt, and chats with what `talk` says."""

    chat: ChatTokens
    reply: Callable[[str], str] = lambda text: "fine"
    talk: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {"content": "fine"}
    misdeeds: list[Misdeed] = field(default_factory=list)
    forever: Misdeed | None = None
    key: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "served", "max_model_len": 512}])
    tokenizer: bool = True
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    address: str = ""

    async def __aenter__(self) -> ApiServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        self._connections: set[asyncio.Task[Any]] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for where, body in self.seen if where == path]

    # ------------------------------------ HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n"))
        }
        length = int(headers.get("content-length", "0"))
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.seen.append((path, body))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.002)
        try:
            return await self._answer(writer, method, path, body, headers.get("authorization", ""))
        finally:
            self.running -= 1

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any], key: str
    ) -> bool:
        misdeed = self.forever or Misdeed()
        if method == "POST" and self.misdeeds:
            misdeed = self.misdeeds.pop(0)
        if misdeed.hang:
            await asyncio.sleep(60)
        if misdeed.drop:
            return False
        status, text = misdeed.status, misdeed.body
        if status == 200 and not text:
            status, answer = self._handle(path, body, key)
            if misdeed.change:
                misdeed.change(answer)
            text = json.dumps(answer)
        content = text.encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n{misdeed.headers}\r\n".encode()
        )
        writer.write(content)
        await writer.drain()
        return True

    # ------------------------------------ answers

    def _handle(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        if self.key and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "no such key"}}
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path == "/v1/completions":
            return 200, self._complete(body)
        if path == "/tokenize" and self.tokenizer:
            return 200, {"tokens": self.chat.encode(body["prompt"]).tolist()}
        if path == "/v1/chat/completions":
            message = {"role": "assistant", **self.talk(body)}
            return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}
        return 404, {"detail": "Not Found"}

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.reply(self.chat.decode_action(body["prompt"]))
        full = [*self.chat.encode(text).tolist(), self.chat.stop_token_ids[0]]
        ids = full[: body["max_tokens"]]
        choice = {
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [LOGPROB] * len(ids)},
            "finish_reason": "stop" if len(ids) == len(full) else "length",
            "text": text,
        }
        return {"choices": [choice]}
