"""Ranks of prefill and of decode workers: what holds requests between their places, and what is held for them."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

from equipoise.errors import InvariantError
from equipoise.sched.extend import Extension
from equipoise.sched.roles import DECODE, PREFILL

FIRST = 7


class Inbox:
    """Brings whole prompts; keeps what it was asked to bring."""

    def __init__(self):
        self.asked = []

    def num_tokens(self, request):
        return request.num_prompt

    def start(self, request, first, upto):
        self.asked.append((request.request_id, first, upto))


@pytest.fixture
def prefill():
    return Rig(role=PREFILL, num_pages=8, max_running=4)


def decode_rig(**settings):
    inbox = Inbox()
    rig = Rig(Extension(remote=inbox), role=DECODE, **{"num_pages": 8, "max_running": 4, **settings})
    rig.inbox = inbox
    return rig


def receive(rig, name, first_token=FIRST):
    return rig.scheduler.kv_received(rig.requests[name].handle, first_token)


# ---------------------------------------------------------------- prefill


def test_prompts_wait_for_their_decode_rank_and_keep_their_pages_until_it_has_the_kv(prefill):
    request = prefill.add("a", 10, max_tokens=1)
    assert prefill.places() == {"a": "bootstrap"}
    assert (prefill.scheduler.has_work, prefill.scheduler.load().num_waiting_tokens) == (False, 10)
    assert prefill.step() == []
    assert prefill.scheduler.explain("a")[0].held_by == "decode rank"
    prefill.scheduler.wake(request.handle)
    assert prefill.step() == [("a", 10)]
    assert prefill.places() == {"a": "inflight"}
    load = prefill.scheduler.load()
    assert (load.num_running, load.num_sent_reqs, load.num_sent_tokens) == (0, 1, 10)
    assert prefill.free == 5
    prefill.scheduler.check()
    prefill.scheduler.kv_sent(request.handle)
    prefill.scheduler.kv_sent(request.handle)
    assert request.finish_reason == "length"
    assert prefill.is_clean()


@pytest.mark.parametrize("upto", ["bootstrap", "waiting", "inflight"])
def test_prompts_can_be_aborted_in_every_place(prefill, upto):
    request = prefill.add("a", 10, max_tokens=1)
    if upto != "bootstrap":
        prefill.scheduler.wake(request.handle)
    if upto == "inflight":
        prefill.step()
    assert prefill.places() == {"a": upto}
    assert prefill.abort("a")
    prefill.scheduler.kv_sent(request.handle)
    prefill.scheduler.check()
    assert prefill.is_clean()


def test_what_a_prefill_rank_parks_bootstraps_later(prefill):
    request = prefill.add("a", 4, max_tokens=1, wait_for="grammar")
    assert prefill.places() == {"a": "parked"}
    prefill.scheduler.wake(request.handle)
    assert prefill.places() == {"a": "bootstrap"}


# ---------------------------------------------------------------- decode


def test_requests_join_the_decode_batch_without_a_chunk():
    rig = decode_rig()
    rig.add("a", 10, max_tokens=3)
    assert rig.places() == {"a": "prealloc"}
    assert rig.step() == []
    assert (rig.places(), rig.inbox.asked) == ({"a": "transfer"}, [("a", 0, 10)])
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_waiting_tokens, rig.scheduler.has_work) == (1, 0, False)
    assert receive(rig, "a") is None
    assert rig.places() == {"a": "waiting"}
    rig.scheduler.check()
    assert rig.step() == [("a", 1)]
    assert rig.last.prefills == []
    assert rig.last.decode_starts.tolist() == [10]
    rig.drain()
    assert rig.requests["a"].output_ids[0] == FIRST
    assert len(rig.requests["a"].output_ids) == 3
    assert rig.is_clean()


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {"stop_token_ids": (FIRST,), "max_tokens": 9}])
def test_a_first_token_may_be_the_last(params):
    rig = decode_rig()
    request = rig.add("a", 10, **params)
    rig.step()
    assert receive(rig, "a") is request
    assert request.finish_reason == ("length" if params["max_tokens"] == 1 else "stop")
    assert request.output_ids == [FIRST]
    assert rig.is_clean()


def test_room_is_for_the_prompt_and_its_first_token():
    rig = decode_rig(num_pages=6)
    rig.add("a", 12)  # three pages, and one for the first token
    rig.add("b", 7)  # two pages: its first token has room on the second
    rig.step()
    assert rig.places() == {"a": "transfer", "b": "transfer"}
    assert rig.free == 0
    rig.add("c", 1)
    rig.step()
    assert rig.places()["c"] == "prealloc"
    assert rig.scheduler.explain("c")[0].held_by == "pages"


def test_seats_are_promised_to_what_is_on_its_way():
    rig = decode_rig(max_running=1)
    for name in "ab":
        rig.add(name, 2, max_tokens=2)
    rig.step()
    assert rig.places() == {"a": "transfer", "b": "prealloc"}
    assert rig.scheduler.explain("b")[0].held_by == "max_running"
    receive(rig, "a")
    rig.step()
    assert rig.ended == {"a": "length"}
    rig.step()
    assert rig.places() == {"b": "transfer"}


def test_those_whose_kv_has_come_pass_those_that_lack_pages():
    rig = decode_rig(num_pages=5)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 7, max_tokens=12)
    rig.add("c", 3, max_tokens=2)
    rig.step()
    receive(rig, "a")
    receive(rig, "b")
    rig.steps(2)
    assert rig.places() == {"a": "decoding", "b": "retracted", "c": "transfer"}
    rig.step()
    assert rig.places()["b"] == "retracted"
    receive(rig, "c")
    assert ("c", 1) in rig.step()


def test_what_was_retracted_is_computed_here_before_others_come():
    rig = decode_rig(num_pages=5)
    rig.add("a", 4, max_tokens=12)
    rig.add("b", 7, max_tokens=12)
    rig.step()
    receive(rig, "a")
    receive(rig, "b")
    rows = rig.steps(6)
    assert rows[0] == [("a", 1), ("b", 1)]
    assert rig.places() == {"a": "decoding", "b": "retracted"}
    rig.add("c", 3, max_tokens=2)
    rig.step()
    assert rig.places() == {"a": "decoding", "b": "retracted", "c": "prealloc"}
    while rig.places().get("b") != "decoding":
        rig.step()
        rig.scheduler.check()
    assert rig.inbox.asked[:2] == [("a", 0, 4), ("b", 0, 7)]
    assert "b" not in [name for name, _, _ in rig.inbox.asked[2:]]


@pytest.mark.parametrize("flushed", [False, True])
def test_transfers_that_fail_end_their_requests(flushed):
    rig = decode_rig()
    request = rig.add("a", 10)
    rig.step()
    if flushed:
        rig.scheduler.flush_cache(preempt_running=True)
    assert receive(rig, "a", FIRST if flushed else None) is request
    assert request.finish_reason == "error"
    rig.scheduler.check()
    assert rig.is_clean()


def test_pages_of_a_request_that_was_aborted_are_free_when_nothing_is_written_any_more():
    rig = decode_rig()
    rig.add("a", 10)
    rig.step()
    assert rig.abort("a")
    assert rig.free == 5
    assert receive(rig, "a") is None
    assert rig.is_clean()
    with pytest.raises(InvariantError, match="#0 loads nothing"):
        receive(rig, "a")


@pytest.mark.parametrize("upto", ["prealloc", "waiting"])
def test_requests_can_be_aborted_before_and_after_their_transfer(upto):
    rig = decode_rig()
    rig.add("a", 10)
    if upto == "waiting":
        rig.step()
        receive(rig, "a")
    assert rig.places() == {"a": upto}
    assert rig.abort("a")
    rig.scheduler.check()
    assert rig.is_clean()


def test_cached_prefixes_are_not_sent_again():
    rig = decode_rig(num_pages=16, prefix_cache=True)
    rig.add("a", list(range(10)), max_tokens=2)
    rig.step()
    receive(rig, "a")
    rig.add("b", list(range(9)), max_tokens=2)
    rig.step()
    assert rig.inbox.asked == [("a", 0, 10), ("b", 8, 9)]
    receive(rig, "b")
    rig.drain()
    assert rig.is_clean()


def test_while_newcomers_are_paused_nobody_joins():
    rig = decode_rig()
    rig.add("a", 4)
    rig.step()
    receive(rig, "a")
    rig.scheduler.pause("new")
    assert rig.step() == []
    rig.scheduler.resume()
    assert rig.step() == [("a", 1)]
