"""Why does a request wait? The rule that holds it back, by name, and since when; and a trace of past decisions."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.places import Places
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.rules import StepView


class Hold(msgspec.Struct, frozen=True):
    """What keeps the head of the queue from being admitted, and since when (clock seconds). "" when nothing does."""

    rule: str
    since_s: float


class Explanation(msgspec.Struct, frozen=True):
    """Where a request is and what it waits for.

    held_by: the rule, resource or event; "order" when it is not the head of the queue; "" when it runs
    held_for_s: seconds for which that rule, resource or event has held it; of those in the queue, their head
    num_ahead: requests that go before it
    """

    request_id: str
    place: str
    held_by: str = ""
    held_for_s: float | None = None
    num_ahead: int = 0
    head_held_by: str = ""
    num_prompt: int = 0
    num_output: int = 0
    num_preemptions: int = 0


def explain(request: Request, places: Places, hold: Hold, now_s: float) -> Explanation:
    """The state of one request that has not ended. O(requests): for people, not for the step."""
    if request.seat is not None:
        places.columns.read_outputs(request, request.seat)
    is_queued = request in places.waiting
    num_ahead = places.waiting.num_ahead(request) if is_queued else 0
    return Explanation(
        request_id=request.request_id,
        place=request.place,
        held_by=_held_by(request, num_ahead, hold, is_queued=is_queued),
        held_for_s=None if (since_s := _held_since_s(request, hold, is_queued=is_queued)) is None else now_s - since_s,
        num_ahead=num_ahead,
        head_held_by=hold.rule if is_queued else "",
        num_prompt=request.num_prompt,
        num_output=len(request.output_ids),
        num_preemptions=request.num_preemptions,
    )


def _held_since_s(request: Request, hold: Hold, *, is_queued: bool) -> float | None:
    if is_queued:
        return hold.since_s if hold.rule else None
    return request.held_since_s if request.place in ("parked", "blocked") else None


def _held_by(request: Request, num_ahead: int, hold: Hold, *, is_queued: bool) -> str:
    if request.parked_for is not None:
        name, share = request.parked_for
        return f"{name} {share}".strip()
    if request.place in ("loading", "transfer"):
        return "remote KV"
    if request.place == "returning":
        return "outputs in flight"
    if is_queued:
        return "order" if num_ahead else hold.rule or "the next step"
    return ""


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One planned step: who ran, who was admitted and preempted, and what held the head of the queue back.

    repeats: how many times the same came again right after a step in which nothing ran
    """

    step: int
    at_s: float
    num_decodes: int
    num_waiting: int
    num_free_seats: int
    held_by: str = ""
    chunks: dict[str, tuple[int, int]] = {}
    admitted: list[str] = []
    preempted: list[str] = []
    repeats: int = 0

    @property
    def ran_nothing(self) -> bool:
        """True when no request ran, was admitted or was preempted."""
        return not (self.num_decodes or self.chunks or self.admitted or self.preempted)

    def is_again(self, last: Decision) -> bool:
        """True when nothing ran, now and in `last`, before the same queue for the same reason."""
        return (
            self.ran_nothing
            and last.ran_nothing
            and (self.num_waiting, self.num_free_seats, self.held_by)
            == (last.num_waiting, last.num_free_seats, last.held_by)
        )


class DecisionTrace:
    """An observer that keeps the last `num_steps` decisions in a ring.

    Steps in which nothing ran and that are alike are one entry, so that a queue that is held does not fill the ring.

    chunks: request -> (start, tokens)"""

    def __init__(self, num_steps: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=num_steps)

    def __call__(self, plan: StepPlan, view: StepView, held_by: str) -> None:
        decision = Decision(
            step=plan.step,
            at_s=view.now_s,
            num_decodes=len(plan.decode_seats),
            num_waiting=view.num_waiting,
            num_free_seats=view.num_free_seats,
            held_by=held_by,
            chunks={row.request.request_id: (row.start, row.n) for row in plan.prefills},
            admitted=[request.request_id for request in plan.seated],
            preempted=[request.request_id for request in plan.preempted],
        )
        last = self._ring[-1] if self._ring else None
        if last is not None and decision.is_again(last):
            self._ring[-1] = msgspec.structs.replace(last, repeats=last.repeats + 1)
        else:
            self._ring.append(decision)

    def decisions(self) -> list[Decision]:
        """Oldest first."""
        return list(self._ring)

    def to_json(self) -> bytes:
        """Oldest first, as a JSON array."""
        return msgspec.json.encode(self.decisions())
