"""The token budget, and adapter slots."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig, make_request

from equipoise.sched.extend import Extension
from equipoise.sched.resources import LoraSlots, TokenBudget


@pytest.mark.parametrize(
    ("unit", "decodes", "chunks", "left", "room"),
    [
        (1, 0, [], 20, 20),
        (1, 3, [5, 12], 0, 0),
        (8, 0, [], 20, 16),
        (8, 3, [], 17, 16),
        (8, 3, [1], 9, 8),
        (8, 3, [9], 1, 0),
        (8, 5, [], 15, 8),
    ],
)
def test_chunks_are_charged_in_units_and_decodes_one_by_one(unit, decodes, chunks, left, room):
    budget = TokenBudget(20, unit)
    budget.charge_decodes(decodes)
    for n in chunks:
        budget.charge_chunk(n)
    assert (budget.left, budget.room) == (left, room)


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_a_refund_undoes_charges(unit, n):
    budget = TokenBudget(40, unit)
    budget.charge_decodes(2)
    budget.charge_chunk(n)
    budget.refund(2, n)
    assert budget.left == 40


def test_a_new_step_fills_up():
    budget = TokenBudget(20)
    budget.charge_chunk(20)
    budget.begin_step()
    assert budget.left == 20


def lora(handle, adapter):
    return make_request(handle, lora=adapter)


def test_adapter_slots_count_adapters_and_not_requests():
    slots = LoraSlots(1)
    x, x2, y, base = lora(0, "x"), lora(1, "x"), lora(2, "y"), lora(3, None)
    assert slots.fit(x, 1)
    slots.take(x, 1)
    assert slots.fit(x2, 1)
    slots.take(x2, 1)
    assert not slots.fit(y, 1)
    assert slots.fit(base, 1)
    slots.take(base, 1)
    slots.give_back(x)
    assert not slots.fit(y, 1)
    slots.give_back(base)
    slots.give_back(x2)
    assert slots.fit(y, 1)
    assert [slots.share(request) for request in (x, y, base)] == ["x", "y", ""]


def test_adapter_slots_tell_when_somebody_blocked_may_fit():
    slots = LoraSlots(1)
    assert not slots.begin_step()
    slots.take(lora(0, "x"), 1)
    assert slots.begin_step()  # others may want the same adapter
    assert not slots.begin_step()
    slots.give_back(lora(0, "x"))
    assert slots.begin_step()


def test_others_pass_a_request_whose_adapter_has_no_slot():
    rig = Rig(Extension(resources=[LoraSlots(1)]))
    rig.add("x", 4, max_tokens=3, lora="x")
    rig.add("y", 4, max_tokens=1, lora="y")
    rig.add("base", 4, max_tokens=1)
    rig.add("x2", 4, max_tokens=1, lora="x")
    assert rig.step() == [("x", 4), ("base", 4), ("x2", 4)]
    assert rig.places() == {"x": "decoding", "y": "blocked"}
    assert rig.steps(2) == [[("x", 1)], [("x", 1)]]
    assert rig.step() == [("y", 4)]
    assert rig.is_clean()


def test_blocked_requests_are_not_looked_at_until_a_slot_moves():
    rig = Rig(Extension(resources=[LoraSlots(1)]))
    rig.add("x", 4, max_tokens=6, lora="x")
    asked = [rig.add(f"y{i}", 4, max_tokens=1, lora="y") for i in range(5)]
    rig.step()
    assert {request.place for request in asked} == {"blocked"}
    rig.step()
    before = [id(request.parked_for) for request in asked]
    rig.steps(2)
    assert [id(request.parked_for) for request in asked] == before  # nobody was parked anew
    rig.drain()
    assert rig.is_clean()
