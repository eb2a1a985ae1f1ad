"""What a step will do (`StepPlan`), and what came of it (`StepResult`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.request import Request


NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


class PrefillRow:
    """Tokens [start, start + n) of a request, to be computed in this step.

    `samples` is True when the chunk reaches the last known token, so that the step draws the next one. The
    last `len(drafts)` tokens may be drafts: a row then draws 1 + len(drafts) tokens, one after each of its
    last tokens.
    """

    __slots__ = ("drafts", "n", "request", "samples", "seat", "start")

    def __init__(
        self, request: Request, seat: int, start: int, n: int, samples: bool, drafts: list[int] | None = None
    ) -> None:
        self.request = request
        self.seat = seat
        self.start = start
        self.n = n
        self.samples = samples
        self.drafts = drafts or []

    @property
    def num_samples(self) -> int:
        """Tokens that the row draws."""
        return 1 + len(self.drafts) if self.samples else 0

    def __repr__(self) -> str:
        return f"<PrefillRow {self.request.request_id} [{self.start}, {self.start + self.n})>"


class StepPlan:
    """One step: decode rows (one token each) as arrays, prefill rows as objects.

    Each token drawn is a *sampled* row; sampled rows are numbered decodes first, then those of the prefill
    rows, in order. `StepOutput.tokens` follows that numbering. `verifies` are the prefill rows, last among
    them, whose outcome decides what their requests compute next; the sampled rows before theirs are `num_plain`.

    decode_seats: (num_decodes,) int64, as all indexes are: numpy gathers by int32 five times slower
    decode_starts: (num_decodes,) int64, position of each decode's input token (KV is written there)
    sampled_seats, sampled_handles: (num_sampled,) int64
    sampled_at: (num_sampled,) int64, position that the drawn token will have
    seated: requests that took a seat in this plan; the executor sets up their sampling state
    """

    __slots__ = (
        "decode_seats",
        "decode_starts",
        "num_plain",
        "num_tokens",
        "preempted",
        "prefills",
        "sampled_at",
        "sampled_handles",
        "sampled_seats",
        "seated",
        "step",
        "verifies",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.decode_seats: NDArray[np.int64] = NO_ROWS
        self.decode_starts: NDArray[np.int64] = NO_ROWS
        self.prefills: list[PrefillRow] = []
        self.seated: list[Request] = []
        self.preempted: list[Request] = []
        self.sampled_seats: NDArray[np.int64] = NO_ROWS
        self.sampled_handles: NDArray[np.int64] = NO_ROWS
        self.sampled_at: NDArray[np.int64] = NO_ROWS
        self.verifies: list[PrefillRow] = []
        self.num_plain = 0
        self.num_tokens = 0

    def drop(self, request: Request) -> tuple[int, int]:
        """Take back every row of a request that still has its seat; the only undo of a plan, before it is committed.

        Returns the tokens of decodes (drafts among them) and those of chunks that were taken back."""
        decodes = self.decode_seats
        self.decode_seats = decodes[decodes != request.seat]
        verified = sum([row.n for row in self.verifies if row.request is request])
        self.verifies = [row for row in self.verifies if row.request is not request]
        dropped = sum([row.n for row in self.prefills if row.request is request])
        self.prefills = [row for row in self.prefills if row.request is not request]
        return len(decodes) - len(self.decode_seats) + verified, dropped

    @property
    def is_empty(self) -> bool:
        """True when no row would run: there is nothing to submit."""
        return self.num_tokens == 0

    @property
    def num_rows(self) -> int:
        """Requests that run in the step."""
        return len(self.decode_seats) + len(self.prefills)

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
