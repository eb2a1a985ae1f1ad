"""The openai client against a simulated server: every way to ask, streamed and not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Server

MODEL = "sim-model"


@pytest.fixture(scope="module")
def client(sim_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sim_server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(client: openai.OpenAI, **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": "12+3="}]
    return client.chat.completions.create(model=MODEL, messages=messages, **more)  # type: ignore[call-overload, no-any-return]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="sim-model"):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="12+3=", max_tokens=8, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="abc", max_tokens=40)
    events = list(
        client.completions.create(
            model=MODEL, prompt="abc", max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 40


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=40).choices[0]
    events = list(ask(client, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"  # type: ignore[attr-defined]
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)  # type: ignore[attr-defined]
    assert text == whole.message.content
    assert events[-2].choices[0].finish_reason == "length"  # type: ignore[attr-defined]
    assert events[-1].usage.completion_tokens == 40  # type: ignore[attr-defined]


def test_without_include_usage_there_is_no_usage(client: openai.OpenAI) -> None:
    events = list(ask(client, max_tokens=3, stream=True))
    assert all(event.choices and event.usage is None for event in events)  # type: ignore[attr-defined]


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    ids = list(b"abc")
    for prompt, count in (("a", 1), (["a", "bc"], 2), (ids, 1), ([ids, ids[:1]], 2)):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)  # type: ignore[call-overload]
        assert [choice.index for choice in answer.choices] == list(range(count))


def test_n_choices_of_each_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=3, seed=7, max_tokens=8)
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 6
    assert len(set(texts[:3])) == 3  # the seed moves on from choice to choice
    again = client.completions.create(model=MODEL, prompt=["a", "b"], n=3, seed=7, max_tokens=8)
    assert [choice.text for choice in again.choices] == texts
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 48)


def test_n_choices_in_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, n=3, seed=7, max_tokens=12)
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for event in ask(client, n=3, seed=7, max_tokens=12, stream=True):
        choice = event.choices[0]  # type: ignore[attr-defined]
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=4, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 4
    first = whole.content[0]
    assert len(first.top_logprobs) == 3
    assert first.logprob <= 0
    assert bytes(first.bytes or []).decode("utf-8", "replace") == first.token
    streamed = []
    for event in ask(client, max_tokens=4, logprobs=True, top_logprobs=3, stream=True):
        logprobs = event.choices[0].logprobs  # type: ignore[attr-defined]
        streamed += logprobs.content if logprobs else []
    assert streamed == whole.content


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=2, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text.startswith("abc")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == 5
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_a_prompt_can_be_scored_without_output(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abcd", max_tokens=0, logprobs=0, echo=True)
    choice = answer.choices[0]
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert len(choice.logprobs.token_logprobs or []) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=1, extra_body={"prompt_logprobs": 1})
    rows = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert rows[0] is None
    assert rows[1][str(tiny_id("b"))]["decoded_token"] == "b"


def tiny_id(letter: str) -> int:
    """Token id of an ASCII letter in the tests' tokenizer: its place among the printable characters."""
    return ord(letter) - ord("!")


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="stop", max_tokens=64, seed=3).choices[0].text
    letters = [letter for letter in whole if letter.isascii() and letter.isprintable()]
    stop = letters[5]
    choice = client.completions.create(model=MODEL, prompt="stop", max_tokens=64, seed=3, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


def test_errors_are_what_the_client_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"


def test_a_schema_that_cannot_be_followed_is_a_400_in_a_stream_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format"):
        list(ask(client, stream=True, response_format={"type": "json_object"}))


def test_request_ids_come_back(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "my-id-1"}
    )
    assert answer.headers["x-request-id"] == "my-id-1"
    assert answer.parse().id == "cmpl-my-id-1"


def test_many_streams_at_once_are_all_whole(client: openai.OpenAI) -> None:
    def one(number: int) -> str:
        events = client.completions.create(model=MODEL, prompt=f"p{number}", max_tokens=50, stream=True)
        return "".join(event.choices[0].text for event in events)

    with ThreadPoolExecutor(32) as pool:
        streamed = list(pool.map(one, range(64)))
    whole = client.completions.create(model=MODEL, prompt=[f"p{number}" for number in range(64)], max_tokens=50)
    assert streamed == [choice.text for choice in whole.choices]
