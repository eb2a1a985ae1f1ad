"""The ledger: exactly what was charged is given back."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import Rig, make_request

from equipoise.errors import InvariantError
from equipoise.sched.ledger import Ledger
from equipoise.sched.roles import DECODE, MIXED, PREFILL


def send(ledger, request, path):
    """Move along `path`, place by place."""
    for place in path.split():
        ledger.move(request, place)


def waiting(ledger):
    return ledger.num_waiting_reqs, ledger.num_waiting_tokens


@pytest.mark.parametrize(
    ("role", "path", "expected"),
    [
        # (requests, tokens) after each place; a request brings 7 tokens
        (MIXED, "parked waiting blocked waiting prefilling", [(0, 0), (1, 7), (1, 7), (1, 7), (0, 0)]),
        (MIXED, "waiting prefilling returning waiting ended", [(1, 7), (0, 0), (1, 7), (1, 7), (0, 0)]),
        (MIXED, "waiting loading waiting ended", [(1, 7), (0, 0), (1, 7), (0, 0)]),
        (PREFILL, "bootstrap waiting prefilling decoding draining", [(1, 7), (1, 7), (0, 0), (0, 0), (0, 0)]),
        (PREFILL, "parked bootstrap ended", [(0, 0), (1, 7), (0, 0)]),
        (DECODE, "prealloc transfer waiting decoding ended", [(1, 7), (1, 0), (1, 0), (0, 0), (0, 0)]),
        (DECODE, "prealloc transfer ended", [(1, 7), (1, 0), (0, 0)]),
    ],
)
def test_each_place_counts_as_its_role_says(role, path, expected):
    ledger, request, seen = Ledger(role), make_request(prompt=7), []
    for place in path.split():
        ledger.move(request, place)
        seen.append(waiting(ledger))
    assert seen == expected
    assert request.place == path.split()[-1]


def test_a_retracted_request_waits_with_all_its_tokens_until_it_holds_kv_again():
    ledger, request = Ledger(DECODE), make_request(prompt=7)
    send(ledger, request, "prealloc transfer waiting decoding")
    request.output_ids = [1, 2]
    ledger.move(request, "retracted")
    assert waiting(ledger) == (1, 9)
    ledger.move(request, "waiting")
    assert waiting(ledger) == (1, 0)


def test_a_request_that_changed_while_waiting_gives_back_what_it_was_charged():
    ledger, request = Ledger(), make_request(prompt=7)
    ledger.move(request, "waiting")
    request.prompt_ids = np.arange(3, dtype=np.int32)
    request.output_ids = [1]
    ledger.move(request, "prefilling")
    assert waiting(ledger) == (0, 0)
    assert ledger.num_prefilling_tokens == 4


def test_chunks_are_paid_one_by_one_and_the_rest_is_given_back():
    ledger, requests = Ledger(), [make_request(i, prompt=10) for i in range(2)]
    for request in requests:
        request.num_computed = 2
        send(ledger, request, "waiting prefilling")
    assert ledger.num_prefilling_tokens == 16
    ledger.compute(requests[0], 3)
    assert ledger.num_prefilling_tokens == 13
    ledger.move(requests[0], "ended")
    assert ledger.num_prefilling_tokens == 8
    ledger.compute(requests[1], 8)
    ledger.move(requests[1], "decoding")
    assert ledger.num_prefilling_tokens == 0


def test_the_output_to_come_is_bounded_by_the_stop_length():
    ledger, request = Ledger(), make_request(prompt=10, max_tokens=6)
    send(ledger, request, "waiting prefilling")
    assert ledger.num_expected_output_tokens == 6
    ledger.deliver(2)
    send(ledger, request, "decoding draining")
    assert ledger.num_expected_output_tokens == 4
    ledger.settle(request, 4)
    ledger.move(request, "ended")
    assert ledger.num_expected_output_tokens == 0


def test_known_cached_tokens_are_never_more_than_what_was_charged():
    ledger, request = Ledger(), make_request(prompt=7)
    ledger.move(request, "waiting")
    ledger.recognise(request, 4)
    assert ledger.num_waiting_uncached_tokens == 3
    ledger.recognise(request, 40)
    assert ledger.num_waiting_uncached_tokens == 0
    ledger.move(request, "prefilling")
    ledger.recognise(request, 4)
    assert ledger.num_waiting_uncached_tokens == ledger.num_prefilling_tokens == 7


def test_what_was_promised_is_given_back_when_the_request_gets_its_seat():
    ledger, request = Ledger(DECODE), make_request(prompt=7)
    send(ledger, request, "prealloc transfer")
    ledger.reserve(request, 5)
    ledger.reserve(request, 3)
    ledger.move(request, "waiting")
    assert (ledger.num_reserved_pages, ledger.reserved(request)) == (3, 3)
    ledger.move(request, "decoding")
    assert (ledger.num_reserved_pages, ledger.reserved(request)) == (0, 0)


def test_a_prefill_rank_knows_what_is_not_acknowledged():
    ledger, request = Ledger(PREFILL), make_request(prompt=7)
    send(ledger, request, "bootstrap waiting prefilling decoding draining")
    request.num_computed = 7
    ledger.settle(request, 0)
    ledger.move(request, "inflight")
    request.num_computed = 0
    assert (ledger.num_sent_reqs, ledger.num_sent_tokens) == (1, 7)
    ledger.move(request, "ended")
    assert (ledger.num_sent_reqs, ledger.num_sent_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("role", "path", "to"),
    [(MIXED, "", "ended"), (MIXED, "", "bootstrap"), (MIXED, "waiting", "decoding"), (PREFILL, "", "waiting")],
)
def test_moves_that_a_role_does_not_know_are_refused_and_change_nothing(role, path, to):
    ledger, request = Ledger(role), make_request(prompt=7)
    send(ledger, request, path)
    before = ledger.sums()
    with pytest.raises(InvariantError, match=f"cannot go to '{to}' in the role {role.name}"):
        ledger.move(request, to)
    assert ledger.sums() == before
    assert request.place == (path or "new")


def test_a_rescan_finds_who_is_charged_wrongly():
    ledger, request = Ledger(), make_request(prompt=7)
    ledger.move(request, "waiting")
    assert ledger.rescan([request], lambda _request: 0) == ledger.sums()
    with pytest.raises(InvariantError, match=r"\[0\] are charged, \[\] are in"):
        ledger.rescan([], lambda _request: 0)
    request.place = "prefilling"
    with pytest.raises(InvariantError, match="are charged"):
        ledger.rescan([request], lambda _request: 0)


# ---------------------------------------------------------------- as a scheduler keeps it


def test_a_life_in_the_load():
    rig = Rig(max_running=1, max_step_tokens=4)
    rig.add("a", 6, max_tokens=3)
    rig.add("b", 5, max_tokens=2)
    rig.plan()
    load = rig.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 5)
    assert (load.num_prefilling_tokens, load.num_inflight_rows, load.num_expected_output_tokens) == (2, 1, 3)
    assert load.num_waiting_uncached_tokens == 7
    rig.land()
    rig.step()
    load = rig.scheduler.load()
    assert (load.num_prefilling_tokens, load.num_inflight_rows, load.num_expected_output_tokens) == (0, 0, 2)
    rig.drain()
    load = rig.scheduler.load()
    assert (load.num_waiting, load.num_waiting_tokens, load.num_expected_output_tokens) == (0, 0, 0)


def test_the_remembered_match_of_a_head_that_does_not_fit_is_not_owed():
    rig = Rig(prefix_cache=True, num_pages=8)
    rig.add("a", list(range(9)), max_tokens=1)
    rig.drain()
    rig.add("b", 16, max_tokens=9)
    rig.step()
    rig.add("c", [*range(8), *range(90, 106)], max_tokens=1)
    rig.step()
    load = rig.scheduler.load()
    assert (load.num_waiting_tokens, load.num_waiting_uncached_tokens) == (24, 16)
    rig.abort("c")
    assert rig.scheduler.load().num_waiting_uncached_tokens == 0


def test_only_the_oldest_outstanding_step_can_come_back():
    rig = Rig(depth=1)
    rig.add("a", 4)
    rig.plan()
    rig.plan()
    rig.outstanding.rotate()
    with pytest.raises(InvariantError, match="step 1 is not the oldest of 2 outstanding steps"):
        rig.land()
