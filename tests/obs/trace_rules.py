"""The rules of the Trace Event Format that a trace of ours keeps, and what is in one."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
NEEDED = {
    "M": {"pid", "tid", "name", "args"},
    "X": {"pid", "tid", "name", "cat", "ts", "dur"},
    "C": {"pid", "tid", "name", "ts", "args"},
    "b": {"pid", "tid", "name", "cat", "ts", "id"},
    "e": {"pid", "tid", "name", "cat", "ts", "id"},
}


def read(text: str) -> list[Event]:
    """The events of a trace that ends well, after a look at each rule."""
    events: list[Event] = json.loads(text)
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    open_slices: dict[tuple[int, str, int], list[Event]] = defaultdict(list)
    for event in events:
        assert NEEDED[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
        match event["ph"]:
            case "X":
                tracks[event["pid"], event["tid"]].append(event)
            case "C":
                assert all(isinstance(value, int) and value >= 0 for value in event["args"].values()), event
            case "b":
                open_slices[event["pid"], event["cat"], event["id"]].append(event)
            case "e":
                begin = open_slices[event["pid"], event["cat"], event["id"]].pop()
                assert (begin["name"], begin["ts"] <= event["ts"]) == (event["name"], True), event
    assert not any(open_slices.values())
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(tracks) <= named
    for slices in tracks.values():
        for one, following in pairwise(slices):
            # Three decimals of a microsecond, added as binary fractions.
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-4, (one, following)
    return events


def steps_of(events: list[Event]) -> list[Event]:
    """The slices that compute."""
    return [event for event in events if event["ph"] == "X" and "args" in event]


def total(events: list[Event], name: str) -> int:
    """Over all steps, of one of their arguments."""
    return sum(event["args"].get(name, 0) for event in steps_of(events))
