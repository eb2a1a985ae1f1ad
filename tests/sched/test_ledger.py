"""The ledger: exactly what was charged is given back."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import make_request

from equipoise.sched.ledger import WAITING, Ledger

NOT_WAITING = ("parked", "prefilling", "decoding", "draining", "ended")


@pytest.mark.parametrize("place", sorted(WAITING))
def test_waiting_places_are_charged_with_the_known_tokens(place):
    ledger, request = Ledger(), make_request(prompt=7)
    request.output_ids = [1, 2]
    ledger.move(request, place)
    assert (request.place, request.charge) == (place, 9)
    assert (ledger.num_waiting_reqs, ledger.num_waiting_tokens) == (1, 9)


@pytest.mark.parametrize("place", NOT_WAITING)
def test_other_places_are_not(place):
    ledger, request = Ledger(), make_request(prompt=7)
    ledger.move(request, place)
    assert (ledger.num_waiting_reqs, ledger.num_waiting_tokens, request.charge) == (0, 0, 0)


def test_a_request_that_changed_while_waiting_gives_back_what_it_was_charged():
    ledger, request = Ledger(), make_request(prompt=7)
    ledger.move(request, "waiting")
    request.prompt_ids = np.arange(3, dtype=np.int32)
    request.output_ids = [1]
    ledger.move(request, "prefilling")
    assert (ledger.num_waiting_reqs, ledger.num_waiting_tokens) == (0, 0)


def test_moving_among_waiting_places_charges_once():
    ledger, request = Ledger(), make_request(prompt=7)
    for place in ("returning", "waiting", "blocked", "waiting"):
        ledger.move(request, place)
    assert (ledger.num_waiting_reqs, ledger.num_waiting_tokens) == (1, 7)


def test_a_rescan_counts_the_same():
    ledger, requests = Ledger(), [make_request(i, prompt=i + 1) for i in range(6)]
    places = ("waiting", "parked", "returning", "decoding", "blocked", "ended")
    for request, place in zip(requests, places, strict=True):
        ledger.move(request, place)
    assert ledger.rescan(requests) == (ledger.num_waiting_reqs, ledger.num_waiting_tokens) == (3, 1 + 3 + 5)
