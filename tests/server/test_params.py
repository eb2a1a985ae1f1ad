from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from equipoise.errors import InvalidValueError
from equipoise.request import Grammar, SamplingParams
from equipoise.server.params import (
    chat_params,
    completion_params,
    constraint_field,
    generate_params,
    grammar_of,
    naming_constraint,
)
from equipoise.server.schemas import chat_decoder, completion_decoder, generate_decoder

VOCAB_SIZE = 1000


def completion(**fields: Any) -> SamplingParams:
    return completion_params(completion_decoder.decode(msgspec.json.encode({"prompt": "a", **fields})), VOCAB_SIZE)


def chat(**fields: Any) -> SamplingParams:
    return chat_params(chat_decoder.decode(msgspec.json.encode({"messages": [], **fields})), VOCAB_SIZE, None)


def generate(sampling: dict[str, Any], **fields: Any) -> SamplingParams:
    body = generate_decoder.decode(msgspec.json.encode({"text": "a", "sampling_params": sampling, **fields}))
    assert not isinstance(body.sampling_params, list)
    assert body.sampling_params is not None
    return generate_params(body, body.sampling_params, VOCAB_SIZE)


def test_what_is_not_given_has_openais_defaults() -> None:
    assert completion() == SamplingParams(max_tokens=16)
    assert completion(**dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "max_tokens"))) == (
        SamplingParams(max_tokens=16)
    )
    assert chat() == SamplingParams(max_tokens=None)
    assert generate({}) == SamplingParams(max_tokens=128)


def test_every_field_arrives() -> None:
    shared: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "n": 2,
    }
    more = {"logit_bias": {"7": -1}, "stop": "s", "stop_token_ids": [3]}
    expected = SamplingParams(
        **shared,
        logit_bias={7: -1.0},
        stop=("s",),
        stop_token_ids=(3,),
        max_tokens=9,
        min_tokens=2,
        seed=4,
        include_stop_str_in_output=True,
    )
    given = {**shared, **more, "min_tokens": 2, "seed": 4, "include_stop_str_in_output": True}
    assert completion(**given, max_tokens=9) == expected
    assert chat(**given, max_tokens=9) == expected
    theirs = {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 4, "no_stop_trim": True}
    assert generate({**shared, **more, **theirs}) == expected


def test_logprobs_in_each_api() -> None:
    assert completion(logprobs=3).logprobs == 3
    assert completion(logprobs=3, echo=True).prompt_logprobs == 3
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False).logprobs is None
    assert generate({}, return_logprob=True, top_logprobs_num=2).logprobs == 2
    assert generate({}, return_logprob=True).prompt_logprobs is None
    assert generate({}, return_logprob=True, logprob_start_len=0).prompt_logprobs == 0


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_top_k_minus_one_is_off() -> None:
    assert completion(top_k=-1) == completion(top_k=0) == completion()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type":"object"}'),
        ),
        ({"guided_json": '{"type": "string"}'}, Grammar("json_schema", '{"type": "string"}')),
        ({"guided_choice": ["a", 'b"']}, Grammar("ebnf", 'root ::= "a" | "b\\""')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("ebnf", "root ::= x")),
        ({"regex": "a"}, Grammar("regex", "a")),
    ],
    ids=str,
)
def test_constraints(fields: dict[str, Any], expected: Grammar | None) -> None:
    body = completion_decoder.decode(json.dumps({"prompt": "a", **fields}))
    assert grammar_of(body) == expected
    assert (constraint_field(body) is None) == (expected is None)


def test_two_constraints_are_named_both() -> None:
    with pytest.raises(InvalidValueError, match="guided_regex and response_format"):
        completion(guided_regex="a", response_format={"type": "json_object"})


def test_the_ranks_complaint_gets_the_fields_name() -> None:
    with pytest.raises(InvalidValueError) as caught, naming_constraint("guided_json"):
        raise InvalidValueError("response_format: bad", "response_format")
    assert (caught.value.field, caught.value.message) == ("guided_json", "guided_json: bad")
    with pytest.raises(InvalidValueError) as other, naming_constraint("guided_json"):
        raise InvalidValueError("prompt: bad", "prompt")
    assert other.value.field == "prompt"
