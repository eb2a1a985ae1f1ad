"""Log-probabilities of prompts, merged into answers that otherwise keep their bytes."""

from __future__ import annotations

import json

import pytest

from equipoise.gateway.relay.merge import merge, merge_event, read_lists

PROMPT = b'{"text": "p", "meta_info": {"input_token_logprobs": [[null, 1], [-0.50, 2]], "input_top_logprobs": [null]}}'
LISTS = {"input_token_logprobs": b"[null, 1], [-0.50, 2]", "input_top_logprobs": b"null"}


def test_lists_are_read_from_answers_of_all_shapes() -> None:
    assert read_lists(PROMPT) == {0: LISTS}
    assert read_lists(b" [%b, {}]" % PROMPT) == {0: LISTS, 1: {}}
    indexed = PROMPT.replace(b"{", b'{"index": 3, ', 1)
    assert read_lists(b"data: %b\n\ndata: {}\n\n: ping\n\ndata: [DONE]\n\n" % indexed) == {3: LISTS, 0: {}}
    assert read_lists(b'{"meta_info": {"input_token_logprobs": null}}') == {0: {}}


@pytest.mark.parametrize("answer", [b"<html>", b"", b"[1]", b"data: {]}\n\n", b'{"meta_info": 7}'])
def test_what_is_no_answer_raises(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_lists(answer)


@pytest.mark.parametrize(
    ("own", "merged"),
    [
        (b'{"meta_info":{"input_token_logprobs":[[-1,3]]}}', [[None, 1], [-0.5, 2], [-1, 3]]),
        (b'{"meta_info":{"input_token_logprobs":[]}}', [[None, 1], [-0.5, 2]]),
        (b'{"meta_info":{"input_token_logprobs":null}}', [[None, 1], [-0.5, 2]]),
        (b'{"meta_info":{}}', [[None, 1], [-0.5, 2]]),
    ],
)
def test_the_prompts_lists_come_first(own: bytes, merged: list[object]) -> None:
    assert json.loads(merge(own, {0: LISTS}))["meta_info"]["input_token_logprobs"] == merged


def test_all_else_keeps_its_bytes() -> None:
    own = b'{"text":"\\u00e9 \xc3\xa9","x":1.50e+3,"meta_info":{"a":[1, 2],"input_token_logprobs":[],"b":0.10}}'
    expected = own.replace(b'"input_token_logprobs":[]', b'"input_token_logprobs":[1]')
    assert merge(own, {0: {"input_token_logprobs": b"1"}}) == expected


def test_batches_are_merged_by_place_and_events_by_index() -> None:
    lists = {0: {"input_token_logprobs": b"0"}, 1: {"input_token_logprobs": b"1"}}
    own = b'{"meta_info":{}}'
    both = json.loads(merge(b"[%b, %b, %b]" % (own, own, own), lists))
    assert [each["meta_info"] for each in both] == [{"input_token_logprobs": [0]}, {"input_token_logprobs": [1]}, {}]
    event = merge_event(b'data: {"index":1,"meta_info":{}}', lists)
    assert event == b'data: {"index":1,"meta_info":{"input_token_logprobs":[1]}}'


@pytest.mark.parametrize("event", [b"data: [DONE]", b": ping", b"", b"data: {]", b'data: {"error": 1}', b"event: x"])
def test_what_has_nothing_to_merge_stays(event: bytes) -> None:
    assert merge_event(event, {0: LISTS}) == event
