"""Traces: valid whatever the times, whole when cut, and what a ring keeps."""

from __future__ import annotations

import json
from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from tests.obs.trace_rules import read, steps_of, total

from equipoise.obs.timeline import KEPT_LINES, StepRing, StepSpan, TraceWriter, trace_of

floats = st.floats(0, 1e5, allow_nan=False)
spans = st.builds(
    lambda gap, last, wait, work: (gap, last, wait, work),
    st.floats(0, 0.1),
    st.floats(0, 10),
    st.floats(0, 12),
    st.tuples(*[st.integers(0, 5000)] * 4, st.integers(-1, 9), st.sampled_from(["", 'a "rule" \\ of mine'])),
)


@given(st.lists(st.lists(spans, max_size=6), min_size=1, max_size=3), floats)
def test_a_trace_keeps_the_rules_of_the_format(
    ranks: list[list[tuple[float, float, float, tuple]]], start: float
) -> None:  # type: ignore[type-arg]
    steps = {}
    for rank, drawn in enumerate(ranks):
        now, steps[rank] = start, []
        for gap, last, wait, work in drawn:
            # As engines round: the next step may seem to begin before this one ended.
            steps[rank].append(StepSpan(now + gap - 2e-9, now + gap + last, wait, *work))
            now += gap + last
    events = read(trace_of('worker "one"', steps))
    written = [step for each in steps.values() for step in each]
    assert len(steps_of(events)) == len(written)
    for place, name in ((3, "prefill_tokens"), (4, "chunks"), (5, "decode_rows"), (6, "kv_tokens")):
        assert total(events, name) == sum(step[place] for step in written)
    for rank, each in steps.items():
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        # Waits are parts of their steps: all slices together last as long as the steps.
        assert abs(sum(event["dur"] for event in slices) / 1e6 - sum(s.ends_s - s.begins_s for s in each)) < 1e-3


def test_slices_waits_and_counters_by_hand() -> None:
    steps = [
        StepSpan(10.0, 10.1, 0.04, 100, 1, 0, 64, num_waiting=2, held_by="max_running"),
        StepSpan(10.1, 10.2, 0.0, 0, 0, 1, 64, num_waiting=0),
    ]
    events = read(trace_of("w", {3: steps}))
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [("prefill", 0, 60_000), ("wait for the slowest", 60_000, 40_000), ("decode", 100_000, 100_000)]
    assert [step["args"] for step in steps_of(events)] == [
        {"prefill_tokens": 100, "chunks": 1, "decode_rows": 0, "kv_tokens": 64, "held_by": "max_running"},
        {"prefill_tokens": 0, "chunks": 0, "decode_rows": 1, "kv_tokens": 64},
    ]
    counters = [(e["name"], e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert counters == [
        ("rank 3 running", 0, 1),
        ("rank 3 waiting", 0, 2),
        ("rank 3 KV tokens", 0, 64),
        ("rank 3 waiting", 100_000, 0),
        ("rank 3 running", 200_000, 0),
    ]


def test_a_rank_that_stands_still_runs_nothing() -> None:
    steps = [StepSpan(0.0, 0.1, 0.0, 0, 0, 4, 9), StepSpan(0.5, 0.6, 0.0, 0, 0, 4, 9)]
    running = [(e["ts"], e["args"]["value"]) for e in read(trace_of("w", {0: steps})) if e["name"] == "rank 0 running"]
    assert running == [(0, 4), (100_000, 0), (500_000, 4), (600_000, 0)]


def test_requests_are_nested_slices() -> None:
    file = StringIO()
    writer = TraceWriter(file, zero_s=1.0)
    writer.request(2, 7, {"prompt_len": 5}, [("queued", 1.0), ("prefill", 1.5), ("decode", 2.0), ("", 4.0)])
    writer.close()
    events = read(file.getvalue())
    assert [(e["ph"], e["name"], e["ts"] / 1e6) for e in events] == [
        ("b", "request 7", 0.0),
        ("b", "queued", 0.0),
        ("e", "queued", 0.5),
        ("b", "prefill", 0.5),
        ("e", "prefill", 1.0),
        ("b", "decode", 1.0),
        ("e", "decode", 3.0),
        ("e", "request 7", 3.0),
    ]


def test_what_was_written_before_a_cut_can_be_read_and_an_empty_trace_too() -> None:
    file = StringIO()
    writer = TraceWriter(file)
    writer.name_rank(0, 0, "rank 0")
    for i in range(KEPT_LINES):
        writer.step(0, 0, StepSpan(float(i), i + 0.5, 0.0, 0, 0, 1, 1))
    assert len(json.loads(file.getvalue() + "]")) >= KEPT_LINES
    empty = StringIO()
    TraceWriter(empty).close()
    assert json.loads(empty.getvalue()) == []


def test_a_ring_keeps_the_last_steps() -> None:
    ring = StepRing(2)
    for i in range(5):
        ring.keep(StepSpan(float(i), i + 1.0, 0.0, 0, 0, 1, 1))
    assert [step.begins_s for step in ring.steps()] == [3.0, 4.0]
