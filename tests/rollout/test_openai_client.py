"""Engines behind an API: what they send, what they accept, and what they make of a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import tiny_models as models
from api_server import LOGPROB, ApiServer, Misdeed
from scripted import CALL, ScriptedEngine

from megatron_agent.contracts import Completed, EngineFailed, FinishReason, Group, Sample, Sampling
from megatron_agent.errors import EngineError
from megatron_agent.settings import RolloutSettings
from megatron_agent.waiting import DeadlineExceeded
from rollout.chat import ChatTokens
from rollout.openai_chat import ChatApiEngine, RecordedChat
from rollout.openai_client import ApiEngine, Retry, TokenApiEngine
from rollout.worker import RolloutWorker

QUICK = Retry(tries=3, first_pause_s=0.01)
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)
LONG = Sampling(temperature=0.0, max_new_tokens=200)
SETTINGS = RolloutSettings(max_context_tokens=2000, refills=0)
Talk = Callable[[TokenApiEngine], Awaitable[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(models.save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def chat(folder: str) -> ChatTokens:
    return ChatTokens(folder)


def talk(server: ApiServer, body: Talk, **options: Any) -> Any:
    async def main() -> Any:
        async with server:
            engine = TokenApiEngine(
                server.address, **{"model": "served", "timeout_s": 5.0, "retry": QUICK, **options}
            )
            try:
                return await body(engine)
            finally:
                await engine.close()

    return asyncio.run(main())


def ask(server: ApiServer, sampling: Sampling = GREEDY, **options: Any) -> Any:
    return talk(server, lambda engine: engine.generate([5, 6, 7], sampling, request_id="r"), **options)


def refusal(server: ApiServer, **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        ask(server, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------- token mode


def test_ids_and_log_probs_are_those_of_the_server(chat: ChatTokens) -> None:
    server = ApiServer(chat, reply=lambda text: "the answer")
    found = ask(server)
    assert found.ids.tolist() == [*chat.encode("the answer").tolist(), chat.stop_token_ids[0]]
    assert found.ids.dtype == np.int32
    assert found.logprobs.tolist() == [LOGPROB] * len(found.ids)
    assert set(found.versions.tolist()) == {-1}
    assert found.finish_reason is FinishReason.STOP
    assert ask(server, Sampling(max_new_tokens=2)).finish_reason is FinishReason.LENGTH


def test_the_request_leaves_nothing_to_the_server(chat: ChatTokens) -> None:
    """What is left out, a server takes from the model's generation config."""
    server = ApiServer(chat)
    ask(server, Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, stop_token_ids=(2,), seed=4))
    [body] = server.bodies("/v1/completions")
    assert body == {
        "model": "served",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 4,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


@pytest.mark.parametrize(
    "misdeed",
    [
        Misdeed(429, headers="retry-after: 0.02\r\n"),
        Misdeed(500, "oh"),
        Misdeed(503),
        Misdeed(408),
        Misdeed(drop=True),
    ],
    ids=["429", "500", "503", "408", "dropped"],
)
def test_what_may_pass_is_tried_again(chat: ChatTokens, misdeed: Misdeed) -> None:
    server = ApiServer(chat, misdeeds=[misdeed, misdeed])
    assert len(ask(server).ids)
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("misdeed", "message"),
    [
        (Misdeed(429, '{"error": {"message": "slow\\ndown"}}'), "HTTP 429 slow down (3 tries)"),
        (Misdeed(500, "<html>"), "HTTP 500 <html> (3 tries)"),
        (
            Misdeed(drop=True),
            "RemoteProtocolError: Server disconnected without sending a response. (3 tries)",
        ),
    ],
)
def test_what_does_not_pass_ends_in_an_error(chat: ChatTokens, misdeed: Misdeed, message: str) -> None:
    server = ApiServer(chat, misdeeds=[misdeed] * 3)
    assert refusal(server) == f"server {server.address}, request r: {message}"
    assert len(server.seen) == 3


def test_the_wait_that_a_server_asks_for_is_kept(chat: ChatTokens) -> None:
    server = ApiServer(chat, misdeeds=[Misdeed(429, headers="retry-after: 0.3\r\n")])
    started = asyncio.run(_seconds(server))
    assert started >= 0.3


async def _seconds(server: ApiServer) -> float:
    clock = asyncio.get_running_loop()
    started = clock.time()
    async with server:
        engine = TokenApiEngine(server.address, model="served", timeout_s=5.0, retry=QUICK)
        await engine.generate([5], GREEDY, request_id="r")
        await engine.close()
    return clock.time() - started


@pytest.mark.parametrize(
    ("misdeed", "message"),
    [
        (Misdeed(body="{oh"), "its answer is not JSON (Expecting property name"),
        (Misdeed(body="[]"), "its answer is not a JSON object but '[]'"),
        (Misdeed(400, '{"error": {"message": "too long"}}'), "HTTP 400 too long"),
        (Misdeed(401), "HTTP 401 (the key is read from OPENAI_API_KEY)"),
        (Misdeed(403, '{"error": "no"}'), "HTTP 403 no"),
        (Misdeed(change=lambda a: a.update(choices=[])), "its answer has no choices"),
        (Misdeed(change=lambda a: a["choices"][0].pop("token_ids")), "it does not return token ids"),
        (
            Misdeed(change=lambda a: a["choices"][0].update(prompt_token_ids=[1, 5, 6, 7])),
            "read another prompt",
        ),
        (Misdeed(change=lambda a: a["choices"][0].update(finish_reason="filter")), "ended with 'filter'"),
        (Misdeed(change=lambda a: a["choices"][0]["logprobs"]["token_logprobs"].pop()), "log-probs for"),
    ],
)
def test_a_wrong_answer_fails_at_once(chat: ChatTokens, misdeed: Misdeed, message: str) -> None:
    server = ApiServer(chat, misdeeds=[misdeed])
    found = refusal(server)
    assert found.startswith(f"server {server.address}, request r: ")
    assert message in found
    assert len(server.seen) == 1


def test_log_probs_that_are_missing_are_not_made_up(chat: ChatTokens) -> None:
    server = ApiServer(chat, misdeeds=[Misdeed(change=lambda a: a["choices"][0].update(logprobs=None))])
    assert np.isnan(ask(server).logprobs).all()


def test_a_server_that_hangs_runs_into_the_deadline(chat: ChatTokens) -> None:
    server = ApiServer(chat, misdeeds=[Misdeed(hang=True)])
    with pytest.raises(DeadlineExceeded, match=r"server .*: request r"):
        ask(server, timeout_s=0.2)


def test_requests_at_once_are_bounded(chat: ChatTokens) -> None:
    server = ApiServer(chat)

    async def many(engine: TokenApiEngine) -> None:
        await asyncio.gather(*(engine.generate([5], GREEDY, request_id=str(i)) for i in range(12)))
        assert (await engine.health())["running"] == 0

    talk(server, many, requests_at_once=3)
    assert server.most_running <= 3
    assert server.most_running > 1


def test_a_server_that_is_gone_is_not_alive_and_says_so(chat: ChatTokens) -> None:
    async def main() -> None:
        async with ApiServer(chat) as server:
            engine = TokenApiEngine(server.address, model="served", retry=QUICK)
            assert (await engine.health())["alive"] is True
        assert (await engine.health())["alive"] is False
        with pytest.raises(EngineError, match=r"ConnectError.*\(3 tries\)"):
            await engine.generate([5], GREEDY, request_id="r")
        with pytest.raises(EngineError, match="cannot be updated"):
            await engine.commit_update(1)
        await engine.close()

    asyncio.run(main())


# ---------------------------------------- connecting


async def meet(engine: TokenApiEngine, chat: ChatTokens) -> str:
    await engine.connect(max_context_tokens=512)
    await engine.check_tokens(chat)
    return engine.model


def test_the_first_model_is_taken_and_the_key_sent(chat: ChatTokens) -> None:
    server = ApiServer(chat, key="secret")
    assert talk(server, lambda engine: meet(engine, chat), model="", api_key="secret") == "served"
    with pytest.raises(EngineError, match=r"401 no such key \(the key is read from OPENAI_API_KEY\)"):
        talk(server, lambda engine: meet(engine, chat), model="", api_key="other")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"model": "other"}, "has no model 'other', it has served"),
        ({"models": []}, {"model": ""}, "list of models: it is empty"),
        ({"models": [{"name": "x"}]}, {}, "it is not that of an OpenAI-compatible server"),
        ({"models": [{"id": "served", "max_model_len": 100}]}, {}, "set rollout.max_context_tokens=100"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    chat: ChatTokens, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        talk(ApiServer(chat, **change), lambda engine: meet(engine, chat), **options)


def test_another_tokenizer_is_refused(
    chat: ChatTokens, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    def one_more(answer: dict[str, Any]) -> None:
        answer["tokens"].append(7)

    with pytest.raises(EngineError, match=r"its tokenizer is not that of .*set model.path to the folder"):
        talk(
            ApiServer(chat, misdeeds=[Misdeed(), Misdeed(change=one_more)]), lambda engine: meet(engine, chat)
        )
    talk(ApiServer(chat, tokenizer=False), lambda engine: meet(engine, chat))
    assert "has no /tokenize" in caplog.text


def test_a_server_without_token_ids_is_told_what_to_do(chat: ChatTokens) -> None:
    for misdeed in (Misdeed(404), Misdeed(change=lambda a: a["choices"][0].pop("token_ids"))):
        with pytest.raises(EngineError, match=r"serve the model with vLLM, or use eval.api_mode=chat"):
            talk(ApiServer(chat, misdeeds=[misdeed]), lambda engine: meet(engine, chat))


def test_an_address_that_is_too_short_is_explained(chat: ChatTokens) -> None:
    async def main() -> None:
        async with ApiServer(chat) as server:
            engine = TokenApiEngine(server.address.removesuffix("/v1"))
            with pytest.raises(EngineError, match="often in /v1"):
                await engine.connect(max_context_tokens=10)
            await engine.close()

    asyncio.run(main())


# ---------------------------------------- through flows

SAMPLES = [
    Sample(
        id=str(index),
        task="lookup",
        prompt=({"role": "user", "content": f"find {start}"},),
        env_name="lookup",
        env_kwargs={
            "table": {"kiwi": "see plum", "plum": f"value {417 + index}"},
            "answer": str(417 + index),
        },
    )
    for index, start in enumerate(("kiwi", "plum"))
]


def call_of(key: str) -> str:
    return f'<tool_call>\n{{"name": "lookup", "arguments": {{"key": "{key}"}}}}\n</tool_call>'


def policy(text: str) -> str:
    """Follows the chain by the last word that it reads."""
    last = [word for word in text.replace("<", " <").split() if word in ("kiwi", "plum") or word.isdigit()][
        -1
    ]
    return f"Answer: {last}" if last.isdigit() else call_of(last)


def played(chat: ChatTokens, engine: Any) -> list[Group]:
    async def main() -> list[Group]:
        worker = RolloutWorker(chat, [engine], SETTINGS)
        groups = [(f"g{sample.id}", sample) for sample in SAMPLES]
        return await worker.play(groups, attempts=2, sampling=LONG)

    return asyncio.run(main())


def served(server: ApiServer, engine: Callable[[], ApiEngine], chat: ChatTokens) -> list[Group]:
    async def main() -> list[Group]:
        async with server:
            client = engine()
            try:
                worker = RolloutWorker(chat, [client], SETTINGS)
                groups = [(f"g{sample.id}", sample) for sample in SAMPLES]
                return await worker.play(groups, attempts=2, sampling=LONG)
            finally:
                await client.close()

    return asyncio.run(main())


def test_episodes_over_the_api_are_those_of_an_engine_with_the_same_policy(chat: ChatTokens) -> None:
    server = ApiServer(chat, reply=policy)
    over_api = served(server, lambda: TokenApiEngine(server.address, model="served"), chat)
    local = played(chat, ScriptedEngine(chat, policy))
    for left, right in zip(over_api, local, strict=True):
        for one, other in zip(left.trajectories, right.trajectories, strict=True):
            assert isinstance(one.outcome, Completed)
            assert one.reward == other.reward == 1.0
            assert len(one.steps) == len(other.steps)
            last = len(one.steps) - 1
            assert one.full_ids(last).tolist() == other.full_ids(last).tolist()


def test_a_server_that_fails_never_becomes_a_reward(chat: ChatTokens) -> None:
    server = ApiServer(chat, forever=Misdeed(500))
    groups = served(server, lambda: TokenApiEngine(server.address, model="served", retry=QUICK), chat)
    for group in groups:
        for trajectory in group.trajectories:
            assert isinstance(trajectory.outcome, EngineFailed)
            assert trajectory.reward is None


# ---------------------------------------- chat mode


def talker(body: dict[str, Any]) -> dict[str, Any]:
    """The same policy in messages: a call as an OpenAI server writes it."""
    text = policy(" ".join(str(message["content"]) for message in body["messages"]))
    if not text.startswith("<tool_call>"):
        return {"content": text}
    call = json.loads(text.split("\n")[1])
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    name = f"call-{len(body['messages'])}"
    return {"content": None, "tool_calls": [{"id": name, "type": "function", "function": function}]}


def test_chat_mode_tells_the_conversation_as_messages(folder: str) -> None:
    chat = RecordedChat(folder)
    server = ApiServer(chat, talk=talker)
    groups = served(server, lambda: ChatApiEngine(server.address, chat, model="served"), chat)
    assert [t.reward for group in groups for t in group.trajectories] == [1.0] * 4
    longest = max(server.bodies("/v1/chat/completions"), key=lambda body: len(body["messages"]))
    assert [message["role"] for message in longest["messages"]] == ["user", *["assistant", "tool"] * 2]
    calls = [call["id"] for m in longest["messages"] for call in m.get("tool_calls", ())]
    assert [m["tool_call_id"] for m in longest["messages"] if m["role"] == "tool"] == calls
    assert longest["tools"][0]["function"]["name"] == "lookup"


def test_chat_mode_gives_nothing_that_could_be_trained_on(folder: str) -> None:
    chat = RecordedChat(folder)
    server = ApiServer(chat, talk=talker)
    groups = served(server, lambda: ChatApiEngine(server.address, chat, model="served"), chat)
    for step in (step for group in groups for t in group.trajectories for step in t.steps):
        assert np.isnan(step.behaviour_logprobs).all()
        assert set(step.versions.tolist()) == {-1}


def test_a_server_that_takes_no_tools_is_refused_before_anything_is_played(folder: str) -> None:
    async def main() -> None:
        told = '{"error": {"message": "auto tool choice is off"}}'
        async with ApiServer(ChatTokens(folder), misdeeds=[Misdeed(400, told)]) as server:
            engine = ChatApiEngine(server.address, RecordedChat(folder), model="served")
            with pytest.raises(EngineError, match="HTTP 400 auto tool choice is off"):
                await engine.check_messages()
            await engine.check_messages()
            await engine.close()

    asyncio.run(main())


def test_chat_mode_refuses_a_context_that_is_not_made_of_messages(folder: str) -> None:
    async def main() -> None:
        chat = RecordedChat(folder)
        async with ApiServer(chat) as server:
            engine = ChatApiEngine(server.address, chat, model="served")
            with pytest.raises(EngineError, match=r"eval\.api_mode=tokens"):
                await engine.generate([5, 6], GREEDY, request_id="r")
            await engine.close()

    asyncio.run(main())


def test_broken_calls_and_unanswered_ones(folder: str) -> None:
    from rollout.openai_chat import UNANSWERED, answered, hermes

    assert hermes({"name": "look", "arguments": {}}) == CALL
    assert '"arguments": {"key": }' in hermes({"name": "lookup", "arguments": '{"key": }'})
    assistant = {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    tool = {"role": "tool", "content": "found"}
    assert answered(assistant, [tool]) == [
        {**tool, "tool_call_id": "a"},
        {"role": "tool", "tool_call_id": "b", "content": UNANSWERED},
    ]
    prose = {"role": "assistant", "content": "hm"}
    assert answered(prose, [tool]) == [{"role": "user", "content": "found"}]
