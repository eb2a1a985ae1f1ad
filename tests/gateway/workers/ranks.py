"""What the ranks of a test worker hold: tokens used and waiting, as the real servers count them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Seat:
    """One request on a rank."""

    prompt: int
    num_generated: int = 0
    is_running: bool = False


@dataclass
class Rank:
    """Tokens and requests of one rank. `used` counts what running requests hold, `waiting_tokens` queued prompts."""

    index: int
    max_running: int
    used: int = 0
    peak: int = 0
    running: int = 0
    waiting_tokens: int = 0
    served: int = 0
    served_tokens: int = 0
    num_generated: int = 0
    queue: deque[tuple[Seat, asyncio.Future[None]]] = field(default_factory=deque)

    async def enter(self, prompt: int) -> Seat:
        """Take a seat, waiting for one in order of arrival. `leave` must follow, also when this is cancelled."""
        seat = Seat(prompt)
        self.served += 1
        self.served_tokens += prompt
        if self.running < self.max_running:
            self._sit(seat)
            return seat
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.append((seat, turn))
        self.waiting_tokens += prompt
        try:
            await turn
        except asyncio.CancelledError:
            if seat.is_running:
                self.leave(seat)
            else:
                self.queue.remove((seat, turn))
                self.waiting_tokens -= prompt
            raise
        return seat

    def grow(self, seat: Seat) -> None:
        """One more token of the answer."""
        seat.num_generated += 1
        self.num_generated += 1
        self.used += 1
        self.peak = max(self.peak, self.used)

    def leave(self, seat: Seat) -> None:
        """Give back all that the request held."""
        self.used -= seat.prompt + seat.num_generated
        self.running -= 1
        seat.is_running = False
        while self.queue and self.running < self.max_running:
            following, turn = self.queue.popleft()
            self.waiting_tokens -= following.prompt
            self._sit(following)
            turn.set_result(None)

    def _sit(self, seat: Seat) -> None:
        seat.is_running = True
        self.running += 1
        self.used += seat.prompt
        self.peak = max(self.peak, self.used)


@dataclass(frozen=True)
class Report:
    """A rank's load at one moment. `taken_at` is in seconds since 1970."""

    rank: int
    used: int
    waiting_tokens: int
    running: int
    waiting: int
    num_generated: int
    taken_at: float


class Reports:
    """Load reports of all ranks, taken anew once the last ones are `frozen_s` old."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks
        self._last: list[Report] = []

    def take(self, frozen_s: float) -> list[Report]:
        """The reports, the same ones again while they are frozen."""
        now = time.time()
        if not self._last or now - self._last[0].taken_at >= frozen_s:
            self._last = [
                Report(one.index, one.used, one.waiting_tokens, one.running, len(one.queue), one.num_generated, now)
                for one in self._ranks
            ]
        return self._last
