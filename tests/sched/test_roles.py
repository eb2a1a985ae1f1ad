"""Roles as data: every place leads on, and every quantity counts places that the role has."""

from __future__ import annotations

import pytest

from equipoise.sched.roles import ROLES, RUNNING


@pytest.fixture(params=sorted(ROLES))
def role(request):
    return ROLES[request.param]


def test_every_place_can_be_reached_and_left(role):
    reached, found = {"new"}, ["new"]
    while found:
        found = [to for place in found for to in role.moves[place] if to not in reached]
        reached.update(found)
    # A request that came into the decode role with its KV prefills only after it was retracted.
    assert reached == set(role.moves)
    assert {place for place, to in role.transitions if to == "ended"} == set(role.moves) - {"new"}


def test_requests_can_go_where_the_role_sends_them(role):
    assert {role.enters, "parked"} == set(role.moves["new"])
    assert role.loads in role.moves["prealloc" if role.joins else "waiting"]
    assert role.returns in role.moves["decoding"]
    assert role.returns in role.moves["returning"]
    assert role.joins == (role.name == "decode")


def test_quantities_count_places_of_the_role(role):
    for places in (role.waiting_reqs, role.waiting_tokens, role.reserving, role.inflight, role.absent, RUNNING):
        assert places <= set(role.moves)
    assert role.waiting_tokens <= role.waiting_reqs
    assert role.absent <= role.waiting_reqs
    assert not role.waiting_reqs & RUNNING
