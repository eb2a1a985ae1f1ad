"""Conversations: each turn's prompt is all that was said before and something new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import ConfigError
from equipoise.sim.workload.request import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.workload.lengths import Lengths

SHARED = -1
"""Session number of the opening that all sessions share."""
SESSION_SHIFT = 32
PIECE_LEN = 16
"""Tokens of a piece: small, so that a turn shares nearly all of the turns before it."""


@dataclass(frozen=True)
class Talk:
    """How sessions go: lengths in tokens, `shared_len` of an opening (a system prompt) that all have in common."""

    num_turns: Lengths
    question: Lengths
    answer: Lengths
    think_s: float = 10.0
    shared_len: int = 0
    most_len: int = 2**31 - 1

    def __post_init__(self) -> None:
        if not self.think_s >= 0:
            raise ConfigError(f"think: {self.think_s} must be at least 0 seconds")
        if self.shared_len < 0:
            raise ConfigError(f"shared-len: {self.shared_len} must be at least 0 tokens")


class Sessions:
    """A session begins at each of `starts`; its next turn comes a time of thought after the answer has ended.

    Times of thought are exponential with the mean `think_s`. A session ends early when its next prompt and answer
    would be longer than `most_len`.
    """

    piece_len = PIECE_LEN

    def __init__(self, starts: Iterator[float], talk: Talk, seed: int) -> None:
        self._starts = starts
        self._talk = talk
        self._seed = seed

    def first(self) -> Iterator[SimRequest]:
        for session, start_s in enumerate(self._starts):
            request = self._turn(session, 0, start_s, self._talk.shared_len)
            if request is not None:
                yield request

    def after(self, ended: SimRequest, now_s: float) -> SimRequest | None:
        if ended.session is None:
            return None
        turn = ended.turn + 1
        thought_s = float(self._rng(ended.session, turn, 1).exponential(self._talk.think_s))
        return self._turn(ended.session, turn, now_s + thought_s, ended.prompt_len + ended.output_len)

    def _turn(self, session: int, turn: int, arrival_s: float, said_len: int) -> SimRequest | None:
        """The turn after `said_len` tokens; None when the session is over."""
        talk = self._talk
        num_turns = int(talk.num_turns.draw(self._rng(session, 0, 2), 1)[0])
        rng = self._rng(session, turn, 0)
        prompt_len = said_len + int(talk.question.draw(rng, 1)[0])
        output_len = int(talk.answer.draw(rng, 1)[0])
        if turn >= num_turns or prompt_len + output_len > talk.most_len:
            return None
        pieces = self._pieces(session, prompt_len + output_len)
        return SimRequest(arrival_s, prompt_len, output_len, pieces, session, turn)

    def _rng(self, session: int, turn: int, purpose: int) -> np.random.Generator:
        """What a turn is like depends on nothing but its place, whatever order the simulation asks in."""
        return np.random.default_rng((self._seed, session, turn, purpose))

    def _pieces(self, session: int, num_tokens: int) -> tuple[int, ...]:
        num_pieces = -(-num_tokens // PIECE_LEN)
        num_shared = min(self._talk.shared_len // PIECE_LEN, num_pieces)
        shared = ((SHARED << SESSION_SHIFT) + i for i in range(num_shared))
        own = ((session << SESSION_SHIFT) + i for i in range(num_shared, num_pieces))
        return (*shared, *own)
