"""KV that a remote store brings: loading takes pages and no seat, and ends with an arrival, whole, in part or not."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

from equipoise.errors import InvariantError
from equipoise.sched.extend import Extension


class Store:
    """Holds the first `num_held` tokens of the prompts called `names`; keeps what it was asked to bring."""

    def __init__(self, num_held, names=None):
        self.num_held, self.names, self.asked = num_held, names, []

    def num_tokens(self, request):
        return self.num_held if self.names is None or request.request_id in self.names else 0

    def start(self, request, first, upto):
        self.asked.append((request.request_id, first, upto))


def remote_rig(num_held, names=None, **settings):
    store = Store(num_held, names)
    rig = Rig(Extension(remote=store), **settings)
    rig.store = store
    return rig


def arrive(rig, name, num_tokens):
    rig.scheduler.kv_arrived(rig.requests[name].handle, num_tokens)


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("prompt", "held", "upto"),
    [(20, 16, 16), (20, 18, 16), (20, 20, 16), (21, 99, 20), (20, 3, None), (4, 4, None), (1, 9, None)],
)
def test_whole_pages_are_brought_and_the_last_token_is_left_to_compute(prompt, held, upto):
    rig = remote_rig(held)
    rig.add("a", prompt, max_tokens=1)
    rows = rig.step()
    if upto is None:
        assert (rows, rig.store.asked) == ([("a", prompt)], [])
        return
    assert (rows, rig.store.asked) == ([], [("a", 0, upto)])
    arrive(rig, "a", upto)
    assert rig.step() == [("a", prompt - upto)]
    assert rig.last.prefills[0].start == upto
    assert rig.requests["a"].num_cached == upto
    assert rig.is_clean()


def test_loading_takes_pages_and_no_seat_and_nothing_waits_meanwhile():
    rig = remote_rig(16, max_running=1, num_pages=20)
    rig.add("a", 20)
    rig.step()
    assert rig.places() == {"a": "loading"}
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, rig.free) == (0, 0, 0, 16)
    assert load.num_used_tokens == 16
    assert not rig.scheduler.has_work
    assert rig.scheduler.explain("a")[0].held_by == "remote KV"
    arrive(rig, "a", 16)
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_waiting_tokens) == (1, 20)
    assert rig.scheduler.has_work
    rig.scheduler.check()
    rig.drain()
    assert rig.is_clean()


def test_others_run_past_one_that_loads():
    rig = remote_rig(16, names=["a"])
    rig.add("a", 20, max_tokens=1)
    rig.add("b", 4, max_tokens=1)
    assert rig.step() == [("b", 4)]
    assert rig.places() == {"a": "loading"}


def test_only_what_lies_beyond_the_cached_prefix_is_brought():
    rig = remote_rig(16, names=["b"], prefix_cache=True)
    shared = list(range(8))
    rig.add("a", shared, max_tokens=1)
    rig.step()
    rig.add("b", [*shared, *range(100, 112)], max_tokens=1)
    rig.step()
    assert rig.store.asked == [("b", 8, 16)]
    arrive(rig, "b", 16)
    assert rig.step() == [("b", 4)]


def test_nothing_is_brought_when_the_cached_prefix_is_as_long():
    rig = remote_rig(16, names=["b"], prefix_cache=True)
    rig.add("a", list(range(17)), max_tokens=1)
    rig.step()
    rig.add("b", list(range(20)), max_tokens=1)
    assert rig.step() == [("b", 4)]
    assert rig.store.asked == []


def test_loaded_pages_serve_others_once_they_are_there():
    rig = remote_rig(16, names=["a"], prefix_cache=True)
    prompt = list(range(20))
    rig.add("a", prompt, max_tokens=9)
    rig.step()
    arrive(rig, "a", 16)
    rig.add("late", prompt, max_tokens=1)
    assert rig.step() == [("a", 4), ("late", 4)]


def test_pages_that_are_being_filled_serve_nobody():
    rig = remote_rig(16, names=["a"], prefix_cache=True)
    rig.add("a", list(range(20)))
    rig.step()
    rig.add("early", list(range(20)), max_tokens=1)
    assert rig.step() == [("early", 20)]


def test_prompt_logprobs_need_every_position_and_load_nothing():
    rig = remote_rig(16)
    rig.add("a", 20, max_tokens=1, prompt_logprobs=0)
    assert rig.step() == [("a", 20)]
    assert rig.store.asked == []


# ---------------------------------------------------------------- arrivals


def test_a_failure_is_computed_here_and_not_asked_for_again():
    rig = remote_rig(16)
    rig.add("a", 20, max_tokens=2)
    rig.step()
    arrive(rig, "a", 0)
    assert rig.free == 64
    assert rig.step() == [("a", 20)]
    rig.drain()
    assert rig.store.asked == [("a", 0, 16)]
    assert rig.requests["a"].num_cached == 0
    assert rig.is_clean()


def test_what_came_in_part_is_kept():
    rig = remote_rig(16)
    rig.add("a", 20, max_tokens=1)
    rig.step()
    arrive(rig, "a", 10)
    assert rig.step() == [("a", 10)]
    assert rig.is_clean()


@pytest.mark.parametrize("num_tokens", [-1, 17, 20])
def test_more_than_was_asked_for_cannot_come(num_tokens):
    rig = remote_rig(16)
    rig.add("a", 20)
    rig.step()
    with pytest.raises(InvariantError, match=f"{num_tokens} tokens arrived .* at most 16"):
        arrive(rig, "a", num_tokens)


def test_an_arrival_that_nobody_waits_for_is_an_error():
    rig = remote_rig(16, names=[])
    rig.add("a", 4)
    with pytest.raises(InvariantError, match="request #0 loads nothing"):
        arrive(rig, "a", 16)


def test_chunks_after_an_arrival_inside_a_page_are_aligned_again():
    rig = remote_rig(16, page_aligned_prefill=True, max_step_tokens=8)
    rig.add("a", 30, max_tokens=1)
    rig.step()
    arrive(rig, "a", 10)
    assert rig.drain() == [[("a", 6)], [("a", 8)], [("a", 6)]]


def test_a_preempted_request_may_load_again():
    rig = remote_rig(16)
    rig.add("a", 20, max_tokens=3)
    rig.step()
    arrive(rig, "a", 16)
    rig.step()
    rig.scheduler.flush_cache(preempt_running=True)
    rig.step()
    assert rig.store.asked == [("a", 0, 16)] * 2
    arrive(rig, "a", 16)
    rig.drain()
    assert len(rig.tokens["a"]) == 3


# ---------------------------------------------------------------- pages promised, given up, in quarantine


def test_nobody_is_admitted_into_pages_that_are_promised():
    rig = remote_rig(8, names=["a"], num_pages=6)
    rig.add("a", 20, max_tokens=1)
    rig.add("b", 8, max_tokens=1)
    assert rig.step() == []
    assert rig.free == 4  # of which a needs three
    assert rig.scheduler.explain("b")[0].held_by == "pages"
    arrive(rig, "a", 8)
    assert rig.step() == [("a", 12)]
    assert rig.step() == [("b", 8)]
    assert rig.is_clean()


def test_two_cannot_load_when_only_one_of_them_could_go_on():
    rig = remote_rig(8, num_pages=6)
    rig.add("a", 16, max_tokens=1)
    rig.add("b", 16, max_tokens=1)
    rig.step()
    assert rig.places() == {"a": "loading", "b": "waiting"}


def test_a_load_leaves_the_watermark_while_others_run():
    rig = remote_rig(8, names=["b"], num_pages=10, watermark=0.5)
    rig.add("a", 4, max_tokens=9)
    rig.step()
    rig.add("b", 20)
    rig.step()
    assert rig.places()["b"] == "waiting"


def test_a_request_that_waits_with_loaded_pages_gives_them_up_when_nobody_runs():
    rig = remote_rig(8, names=["a", "b"], num_pages=8, order="priority")
    rig.add("a", 12, max_tokens=1, priority=1)
    rig.add("b", 12, max_tokens=1, priority=1)
    rig.step()
    arrive(rig, "a", 8)
    arrive(rig, "b", 8)
    rig.add("urgent", 28, max_tokens=1)
    assert rig.step() == []
    assert rig.last.preempted == [rig.requests["b"]]  # the last in order
    assert rig.step() == []
    assert rig.step() == [("urgent", 28)]
    assert rig.drain() == [[("a", 12), ("b", 12)]]  # computed instead
    assert rig.is_clean()


def test_a_prefill_that_runs_alone_takes_the_pages_of_one_that_waits_with_them():
    # without room reserved for whole prompts, it would preempt itself and start anew, for ever
    rig = remote_rig(16, names=["b"], num_pages=8, order="priority", reserve_full_prompt=False, max_step_tokens=4)
    rig.add("b", 20, max_tokens=1, priority=1)
    rig.step()
    arrive(rig, "b", 16)
    rig.add("a", 28, max_tokens=1)
    assert rig.steps(4) == [[("a", 4)]] * 4
    assert rig.free == 0
    assert rig.step() == [("a", 4)]
    assert rig.last.preempted == [rig.requests["b"]]
    assert rig.requests["a"].num_preemptions == 0
    rig.drain()
    assert rig.ended == {"a": "length", "b": "length"}
    assert rig.is_clean()


def test_while_others_run_those_who_wait_with_loaded_pages_keep_them():
    rig = remote_rig(16, names=["b"], num_pages=8, order="priority", reserve_full_prompt=False, max_step_tokens=5)
    rig.add("c", 3, max_tokens=40)
    rig.add("b", 20, max_tokens=1, priority=2)
    rig.step()
    rig.add("a", 28, max_tokens=1, priority=1)
    arrive(rig, "b", 16)
    while not rig.requests["a"].num_preemptions:
        rig.step()
    assert rig.last.preempted == [rig.requests["a"]]
    assert (rig.requests["b"].num_preemptions, len(rig.requests["b"].pages)) == (0, 4)
    rig.abort("c")
    rig.drain()
    assert rig.is_clean()


def test_what_a_store_brought_is_not_owed_until_it_is_given_up():
    rig = remote_rig(16, max_running=1)
    rig.add("a", 20)
    rig.step()
    rig.add("urgent", 4, max_tokens=8, arrival_s=-1.0)
    arrive(rig, "a", 16)
    load = rig.scheduler.load()
    assert (load.num_waiting_tokens, load.num_waiting_uncached_tokens) == (24, 8)
    rig.scheduler.flush_cache(preempt_running=True)
    assert rig.scheduler.load().num_waiting_uncached_tokens == 24


def test_a_head_that_would_load_makes_the_loaded_give_way_too():
    rig = remote_rig(8, num_pages=8, order="priority")
    rig.add("a", 12, max_tokens=1, priority=1)
    rig.step()
    arrive(rig, "a", 8)
    rig.add("urgent", 28, max_tokens=1)
    rig.step()
    rig.step()
    assert rig.places() == {"a": "waiting", "urgent": "loading"}
    arrive(rig, "urgent", 8)
    rig.drain()
    assert rig.ended == {"a": "length", "urgent": "length"}
    assert rig.is_clean()


@pytest.mark.parametrize("num_tokens", [0, 16])
def test_pages_of_an_aborted_load_are_kept_until_nothing_is_written_any_more(num_tokens):
    rig = remote_rig(16)
    rig.add("a", 20)
    rig.step()
    rig.abort("a")
    assert rig.scheduler.num_requests == 0
    assert rig.free == 60
    rig.scheduler.check()
    arrive(rig, "a", num_tokens)
    assert rig.is_clean()
    rig.scheduler.check()


def test_an_aborted_load_keeps_its_pages_and_not_its_promise():
    rig = remote_rig(8, names=["a"], num_pages=6)
    rig.add("a", 20)
    rig.step()
    rig.abort("a")
    rig.add("b", 16, max_tokens=1)
    assert rig.step() == [("b", 16)]


def test_a_deadline_ends_a_load_and_a_loaded_request():
    rig = remote_rig(8)
    rig.add("a", 12, deadline_s=1.0)
    rig.add("b", 12, deadline_s=1.0)
    rig.step()
    arrive(rig, "b", 8)
    rig.clock.advance(1.0)
    assert len(rig.scheduler.expire()) == 2
    assert rig.free == 62
    arrive(rig, "a", 8)
    assert rig.is_clean()


def test_what_came_or_comes_is_not_used_after_a_flush_that_starts_all_anew():
    rig = remote_rig(16)
    rig.add("a", 20, max_tokens=1)
    rig.add("b", 20, max_tokens=1)
    rig.step()
    arrive(rig, "a", 16)
    rig.scheduler.flush_cache(preempt_running=True)
    assert rig.free == 60
    arrive(rig, "b", 16)
    assert rig.free == 64
    assert rig.step() == [("a", 20), ("b", 20)]
