"""The openai client through the gateway: to our own server, and to workers that call tools and embed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest
from tests.server.raw import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gateway.processes import Fleet, Gateway, Worker
    from tests.serving import Server

MODEL = "sim-model"
OTHER = "test-model"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def worker(shared_fleet: Fleet) -> Worker:
    return shared_fleet.sglang().wait_ready()


@pytest.fixture(scope="module")
def gateway(shared_fleet: Fleet, sim_server: Server, worker: Worker) -> Gateway:
    """Before two models: one on our own server, one on an SGLang-like worker."""
    return shared_fleet.gateway("--worker", sim_server.url, "--worker", worker.url)


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def direct(sim_server: Server) -> Iterator[openai.OpenAI]:
    """The same server without a gateway."""
    with openai.OpenAI(base_url=f"{sim_server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def messages(text: str = "12+3=") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models_of_all_workers(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == [MODEL, OTHER]
    assert client.models.retrieve(MODEL).id == MODEL


def test_an_unknown_model_is_a_404_that_names_the_known(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"{MODEL}.*{OTHER}|{OTHER}.*{MODEL}") as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"


def test_completion(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    here, there = (one.completions.create(model=MODEL, prompt="12+3=", max_tokens=8) for one in (client, direct))
    assert here.choices == there.choices
    assert here.usage == there.usage


def test_chat_stream(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    texts = []
    for one in (client, direct):
        with one.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=messages(), max_tokens=40, stream=True, stream_options={"include_usage": True}
        ) as stream:
            events = list(stream)
        assert events[-1].usage.completion_tokens == 40
        texts.append("".join(event.choices[0].delta.content or "" for event in events if event.choices))
    assert texts[0] == texts[1] != ""


def test_asynchronous_streams_side_by_side(gateway: Gateway, direct: openai.OpenAI) -> None:
    async def all_texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(model=MODEL, prompt=f"p{number}", max_tokens=30, stream=True)
                return "".join([event.choices[0].text async for event in stream])

            return list(await asyncio.gather(*(one(number) for number in range(32))))

    whole = direct.completions.create(model=MODEL, prompt=[f"p{number}" for number in range(32)], max_tokens=30)
    assert asyncio.run(all_texts()) == [choice.text for choice in whole.choices]


def test_errors_of_the_server_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages(), temperature=-1)  # type: ignore[arg-type]
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=messages(), stream=True, response_format={"type": "json_object"}
        )


def test_request_ids_come_back(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "my-id-1"}
    )
    assert answer.headers["x-request-id"] == "my-id-1"
    assert answer.parse().id == "cmpl-my-id-1"
    assert client.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1).headers["x-request-id"]


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=OTHER, messages=messages(), tools=[WEATHER])  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_streamed_tools(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=OTHER, messages=messages(), tools=[WEATHER]) as stream:  # type: ignore[list-item]
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "weather"


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=OTHER, input=["a", "bcd"], encoding_format="float")
    assert [row.embedding[2] for row in answer.data] == [1, 3]
    with pytest.raises(openai.BadRequestError, match="Input cannot be empty"):
        client.embeddings.create(model=OTHER, input="", encoding_format="float")


def test_a_server_without_embeddings_says_so_itself(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    said = []
    for one in (client, direct):
        with pytest.raises(openai.APIStatusError) as caught:
            one.embeddings.create(model=MODEL, input="a")
        said.append((caught.value.status_code, caught.value.body))
    assert said[0] == said[1]


def test_a_stream_that_is_left_frees_the_server(client: openai.OpenAI, gateway: Gateway, worker: Worker) -> None:
    worker.change(token_s=0.02, answer_tokens=2000)
    stream = client.chat.completions.create(model=OTHER, messages=messages(), stream=True)  # type: ignore[call-overload]
    next(iter(stream))
    stream.close()
    worker.change(token_s=0.0, answer_tokens=16)
    wait_for(lambda: worker.seen()[-1]["outcome"] == "left", "the worker sees it")
