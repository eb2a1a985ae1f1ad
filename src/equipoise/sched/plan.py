"""What a step will do (`StepPlan`), and what came of it (`StepResult`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.request import Request


class PrefillRow:
    """Tokens [start, start + n) of a request, to be computed in this step.

    `samples` is True when the chunk reaches the last known token, so that the step draws the next one.
    """

    __slots__ = ("n", "request", "samples", "seat", "start")

    def __init__(self, request: Request, seat: int, start: int, n: int, samples: bool) -> None:
        self.request = request
        self.seat = seat
        self.start = start
        self.n = n
        self.samples = samples

    def __repr__(self) -> str:
        return f"<PrefillRow {self.request.request_id} [{self.start}, {self.start + self.n})>"


class StepPlan:
    """One step: decode rows (one token each) as arrays, prefill rows as objects.

    A row that draws a token is a *sampled* row; sampled rows are numbered decodes first, then the
    prefill rows with `samples`, in order. `StepOutput.tokens` follows that numbering.

    decode_seats: (num_decodes,) int32
    decode_starts: (num_decodes,) int64, position of each decode's input token (KV is written there)
    sampled_seats, sampled_handles: (num_sampled,) int32, int64
    sampled_at: (num_sampled,) int64, position that the drawn token will have
    seated: requests that took a seat in this plan; the executor sets up their sampling state
    """

    __slots__ = (
        "decode_seats",
        "decode_starts",
        "num_tokens",
        "preempted",
        "prefills",
        "sampled_at",
        "sampled_handles",
        "sampled_seats",
        "seated",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.decode_seats: NDArray[np.int32] = np.empty(0, np.int32)
        self.decode_starts: NDArray[np.int64] = np.empty(0, np.int64)
        self.prefills: list[PrefillRow] = []
        self.seated: list[Request] = []
        self.preempted: list[Request] = []
        self.sampled_seats: NDArray[np.int32] = np.empty(0, np.int32)
        self.sampled_handles: NDArray[np.int64] = np.empty(0, np.int64)
        self.sampled_at: NDArray[np.int64] = np.empty(0, np.int64)
        self.num_tokens = 0

    def drop(self, request: Request) -> tuple[int, int]:
        """Take back every row of a request that still has its seat; the only undo of a plan, before it is committed.

        Returns the decode rows and the chunk tokens that were taken back."""
        decodes = self.decode_seats
        self.decode_seats = decodes[decodes != request.seat]
        dropped = sum(row.n for row in self.prefills if row.request is request)
        self.prefills = [row for row in self.prefills if row.request is not request]
        return len(decodes) - len(self.decode_seats), dropped

    @property
    def is_empty(self) -> bool:
        """True when no row would run: there is nothing to submit."""
        return self.num_tokens == 0

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefill rows."""
        return self.num_tokens - len(self.decode_seats)


class StepResult:
    """What `Scheduler.apply` hands on: tokens that reached their requests, and requests that ended.

    rows: (num_delivered,) int64, index of each delivered token among the plan's sampled rows
    handles, tokens: (num_delivered,) int64, int32
    """

    __slots__ = ("finished", "handles", "rows", "tokens")

    def __init__(
        self,
        rows: NDArray[np.int64],
        handles: NDArray[np.int64],
        tokens: NDArray[np.int32],
        finished: list[Request],
    ) -> None:
        self.rows = rows
        self.handles = handles
        self.tokens = tokens
        self.finished = finished
