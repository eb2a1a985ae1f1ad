"""Drafts: tokens guessed ahead, computed in one step and kept as far as they are what would have been drawn.

A row with k drafts draws 1 + k tokens, each with the random number of its own position: so what is kept
equals, token for token, what comes without drafts. Since the next step depends on how much was kept, a
drafting request has at most one row in flight, whatever the depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from equipoise.request import Request, Tokens


class Drafter(Protocol):
    """Guesses how a request goes on."""

    def drafts_for(self, request: Request) -> bool:
        """Does `request` run with drafts at all? Asked once per seat."""
        ...

    def propose(self, request: Request, tokens: Tokens, most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`, (num_known,) int32."""
        ...


def can_draft(request: Request) -> bool:
    """Draws that depend on the draws before them, beyond the tokens, cannot be made side by side."""
    params = request.params
    has_penalty = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return not has_penalty and params.grammar is None


class NgramDrafter:
    """Looks for the last tokens earlier in the request's own text and proposes what followed them there.

    Helps where outputs repeat their prompt: summaries, code edits, extraction. Needs no second model."""

    def __init__(self, num_drafts: int, max_match: int = 4, min_match: int = 2) -> None:
        """Propose up to `num_drafts` tokens after a match of `max_match` tokens, or fewer down to `min_match`."""
        self._num_drafts = num_drafts
        self._sizes = range(max_match, min_match - 1, -1)

    def drafts_for(self, request: Request) -> bool:
        return can_draft(request)

    def propose(self, request: Request, tokens: Tokens, most: int) -> list[int]:
        most = min(most, self._num_drafts)
        for size in self._sizes:
            if most <= 0 or len(tokens) <= size:
                continue
            end = _last_match(tokens, size)
            if end is not None:
                return [int(token) for token in tokens[end : end + most]]
        return []


def _last_match(tokens: Tokens, size: int) -> int | None:
    """End of the last earlier place where the last `size` tokens stand; None when there is none."""
    tail = tokens[-size:]
    ends = np.flatnonzero(tokens[size - 1 : -1] == tail[-1]) + size
    for back in range(2, size + 1):
        ends = ends[tokens[ends - back] == tail[-back]]
    return int(ends[-1]) if len(ends) else None
