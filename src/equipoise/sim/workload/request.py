"""A request before anybody serves it, and where requests come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class SimRequest(NamedTuple):
    """A request of a workload; lengths in tokens, both at least 1.

    The text (prompt, then output) is made of pieces of the workload's `piece_len` tokens. Two requests have the
    same text up to the end of piece i if, and only if, their `pieces[i]` are equal: an id stands for a piece and
    for all that comes before it. What lies beyond the pieces is like nothing else.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    pieces: tuple[int, ...] = ()
    session: int | None = None
    turn: int = 0


class Workload(Protocol):
    """Requests over virtual time."""

    @property
    def piece_len(self) -> int:
        """Tokens of a piece."""
        ...

    def first(self) -> Iterator[SimRequest]:
        """Those that arrive whatever becomes of others, in order of arrival."""
        ...

    def after(self, ended: SimRequest, now_s: float) -> SimRequest | None:
        """What arrives, at `now_s` or later, because `ended` has ended: the next of a closed loop or of a session."""
        ...


class OpenLoop:
    """A workload whose requests arrive whatever becomes of those before them."""

    def __init__(self, requests: Iterator[SimRequest], piece_len: int = 512) -> None:
        self.piece_len = piece_len
        self._requests = requests

    def first(self) -> Iterator[SimRequest]:
        return self._requests

    def after(self, ended: SimRequest, now_s: float) -> SimRequest | None:
        return None
