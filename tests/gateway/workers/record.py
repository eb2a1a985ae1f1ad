"""What a test worker saw: every request with its rank, and every client that left."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gateway.workers.http import Request

MAX_KEPT = 4000
MAX_BODY_CHARS = 4000


@dataclass
class Seen:
    """One request. Times are monotonic seconds, the same clock in every process of this machine."""

    path: str
    headers: list[tuple[str, str]]
    body: str
    received_at: float
    rank: int | None = None
    outcome: str = "running"  # ended, failed, refused or left
    num_tokens: int = 0
    ended_at: float | None = None


class Record:
    """The last MAX_KEPT requests, and counts of all."""

    def __init__(self) -> None:
        self.requests: deque[Seen] = deque(maxlen=MAX_KEPT)
        self.outcomes: dict[str, int] = {}
        self.disconnects: deque[dict[str, object]] = deque(maxlen=MAX_KEPT)
        self.num_polls: dict[str, int] = {}

    def begin(self, request: Request) -> Seen:
        """Note a generation request; `end` must follow."""
        body = request.body[:MAX_BODY_CHARS].decode("utf-8", "replace")
        seen = Seen(request.target, request.headers, body, request.received_at)
        self.requests.append(seen)
        return seen

    def end(self, seen: Seen, outcome: str) -> None:
        """How it went."""
        seen.outcome = outcome
        seen.ended_at = time.monotonic()
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if outcome == "left":
            self.disconnects.append({"at": seen.ended_at, "path": seen.path, "num_tokens": seen.num_tokens})

    def poll(self, request: Request) -> None:
        """Count a request for anything but generation."""
        self.num_polls[request.path] = self.num_polls.get(request.path, 0) + 1

    def as_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "outcomes": self.outcomes,
            "polls": self.num_polls,
            "disconnects": list(self.disconnects),
            "requests": [asdict(seen) for seen in self.requests],
        }
