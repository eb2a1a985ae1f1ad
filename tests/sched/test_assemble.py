"""Settings that cannot work are refused in one line; the others are what they say."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig

from equipoise.config import SchedulerConfig
from equipoise.errors import ConfigError
from equipoise.sched.rules import RankState


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 0}, "num-pages: 0 pages of 4 tokens hold no prompt and its output"),
        (
            {"chunked_prefill": False, "max_step_tokens": 127},
            "max-step-tokens: 127 is less than the model's length 128",
        ),
        ({"order": "random"}, "order: 'random' is not one of fcfs, priority"),
        ({"max_running": 0}, "max-running: 0 must be at least 1"),
        ({"max_step_tokens": 0}, "max-step-tokens: 0 must be at least 1"),
        ({"long_prefill_cap": -1}, "long-prefill-cap: -1 must be at least 0"),
        ({"depth": -1}, "depth: -1 must be at least 0"),
        ({"watermark": 1.0}, "watermark: 1.0 must be at least 0 and less than 1"),
        ({"watermark": float("nan")}, "watermark: nan must be"),
        ({"max_waiting_reqs": 0}, "max-waiting-reqs: 0 must be at least 1"),
        ({"max_waiting_tokens": 0}, "max-waiting-tokens: 0 must be at least 1"),
        ({"min_free_seats": 9}, "min-free-seats: 9 is more than max-running, 8"),
        ({"balance": True, "balance_margin": 8}, "balance-margin: 8 must be less than max-running, 8"),
        ({"balance": True, "max_running": 1}, "balance-margin: 1 must be less than max-running, 1"),
        ({"balance": True, "balance_margin": -1}, "balance-margin: -1 must be at least 0"),
        ({"balance_margin": 1}, "balance-margin: 1 has no effect while balance is off"),
        ({"prefill_alignment_passes": 3}, "prefill-alignment-passes: 3 has no effect while prefill-alignment is off"),
        (
            {"prefill_alignment_delay_s": 3.0},
            "prefill-alignment-delay: 3.0 has no effect while prefill-alignment is off",
        ),
        (
            {"prefill_alignment": True, "prefill_alignment_passes": 0},
            "prefill-alignment-passes: 0 must be at least 1",
        ),
        (
            {"prefill_alignment": True, "prefill_alignment_delay_s": 0.0},
            "prefill-alignment-delay: 0.0 must be more than 0",
        ),
        ({"rent_or_buy_max_delay_s": 3.0}, "rent-or-buy-max-delay: 3.0 has no effect while rent-or-buy is off"),
        ({"rent_or_buy": True, "rent_or_buy_max_delay_s": 0.0}, "rent-or-buy-max-delay: 0.0 must be more than 0"),
        ({"admission_cap": 0}, "admission-cap: 0 must be at least 1"),
        ({"prefill_interval": 0}, "prefill-interval: 0 must be at least 1"),
        ({"ageing_s": 0.0}, "ageing-s: 0.0 must be more than 0"),
        ({"max_bypass": -1}, "max-bypass: -1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message.split(" must be")[0]) as refused:
        Rig(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_models_length_is_bounded_by_the_pages():
    # 8 tokens have pages, and the last token is drawn but never computed
    assert Rig(num_pages=2).scheduler.max_model_len == 9
    assert Rig(num_pages=64).scheduler.max_model_len == 128


def test_one_page_of_one_token_is_enough():
    rig = Rig(num_pages=1, page_size=1)
    rig.add("a", 1, max_tokens=1)
    assert rig.drain() == [[("a", 1)]]


def test_the_longest_request_fits_exactly():
    rig = Rig(num_pages=3, max_step_tokens=5)
    rig.add("a", 6, max_tokens=7)
    rig.drain()
    assert len(rig.tokens["a"]) == 7
    assert rig.requests["a"].num_preemptions == 0


def test_depth_and_seats_are_handed_on():
    scheduler = Rig(depth=2, max_running=3).scheduler
    assert (scheduler.depth, scheduler.max_running, scheduler.columns.num_seats) == (2, 3, 3)


@pytest.mark.parametrize(("watermark", "prompt"), [(0.25, 28), (0.3, 24), (0.0, 36)])
def test_a_watermark_is_a_share_of_the_pages_rounded_down(watermark, prompt):
    # one of ten pages is a's; b may have the rest but for the watermark: 2 pages, 3 pages, none
    for tokens, enters in ((prompt, True), (prompt + 1, False)):
        rig = Rig(num_pages=10, watermark=watermark)
        rig.add("a", 3, max_tokens=2)
        rig.step()
        rig.add("b", tokens, max_tokens=1)
        assert (("b", tokens) in rig.step()) == enters


def test_defaults_are_asynchronous_by_one_step():
    assert SchedulerConfig().depth == 1


def with_a_peer(rig, num_running=0):
    """One step beside another rank that runs so many and wants no prefill; the rows of the step."""
    scheduler = rig.scheduler
    plan = scheduler.schedule((scheduler.state(), RankState(num_running, 0)))
    if not plan.is_empty:
        rig.outstanding.append(plan)
        rig.land()
    return [(row.request.request_id, row.n) for row in plan.prefills]


@pytest.mark.parametrize(
    ("settings", "full_from"),
    [({}, None), ({"balance": True}, 7), ({"balance": True, "balance_margin": 0}, 8)],
)
def test_balance_admits_nobody_while_a_rank_is_full(settings, full_from):
    for num_running in range(9):
        rig = Rig(**settings)
        rig.add("a", 4)
        is_full = full_from is not None and num_running >= full_from
        assert with_a_peer(rig, num_running) == ([] if is_full else [("a", 4)])


@pytest.mark.parametrize(
    ("settings", "waits"),
    [({}, 30), ({"prefill_alignment_passes": 2}, 2), ({"prefill_alignment_delay_s": 3.0}, 3)],
)
def test_prefill_alignment_waits_for_the_other_ranks_within_its_bounds(settings, waits):
    rig = Rig(prefill_alignment=True, **settings)
    rig.add("a", 4)
    for _ in range(waits):
        assert with_a_peer(rig) == []
        # 5 seconds, the default, take more steps than 30
        rig.clock.advance(1.0 if "prefill_alignment_delay_s" in settings else 0.01)
    assert with_a_peer(rig) == [("a", 4)]


def test_cadence_counts_from_the_last_step_that_prefilled():
    rig = Rig(prefill_interval=4)
    rig.add("long", 4, max_tokens=100)
    rig.steps(6)
    rig.add("after a pause", 4, max_tokens=1)
    assert ("after a pause", 4) in rig.step()
    rig.add("close behind", 4, max_tokens=1)
    assert [("close behind", 4) in rig.step() for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("interval", [2, 3, 4, 8])
@pytest.mark.parametrize("passes", [1, 2, 3, 7])
def test_cadence_and_alignment_meet_in_a_bounded_number_of_steps(interval, passes):
    rig = Rig(prefill_alignment=True, prefill_alignment_passes=passes, prefill_interval=interval, max_running=2)
    rig.add("long", 4, max_tokens=100)
    for _ in range(passes):
        assert with_a_peer(rig) == []
    assert with_a_peer(rig) == [("long", 4)]
    for offset in range(interval):
        rig.steps(offset)  # the cadence counts on while the ranks agree
        name = f"late {offset}"
        rig.add(name, 4, max_tokens=1)
        # the rest of an opening that came too early, the wait, and an opening that has a step of the cadence
        assert [(name, 4)] in [with_a_peer(rig) for _ in range(interval - 1 + passes + interval)]


def test_rent_or_buy_holds_a_lone_prefill_back_for_a_bounded_time_and_is_named():
    rig = Rig(rent_or_buy=True, rent_or_buy_max_delay_s=0.4)
    busy = RankState(4, 0, step_s=0.1)
    for tokens in (9, 0):
        rig.scheduler.look((rig.scheduler.state(), RankState(4, 0, step_s=0.1 + tokens, step_prefill_tokens=tokens)))
    request = rig.add("a", 4)
    waits = 0
    while rig.scheduler.schedule((rig.scheduler.state(), busy)).is_empty:
        (why,) = rig.scheduler.explain("a")
        assert why.held_by == "RentOrBuy"
        waits += 1
    assert waits == 3
    assert request.seat is not None
