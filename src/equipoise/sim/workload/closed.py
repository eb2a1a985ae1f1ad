"""Closed loops: who ends makes room for the next."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.workload.request import SimRequest


class ClosedLoop:
    """`concurrency` requests at any time, until those of `bodies` are used up."""

    def __init__(self, bodies: Iterator[SimRequest], concurrency: int, piece_len: int = 512) -> None:
        """`bodies`: requests whose arrival does not count. Raises ConfigError on a concurrency below 1."""
        if concurrency < 1:
            raise ConfigError(f"concurrency: {concurrency} must be at least 1")
        self.piece_len = piece_len
        self._bodies = bodies
        self._concurrency = concurrency

    def first(self) -> Iterator[SimRequest]:
        return (body._replace(arrival_s=0.0) for body in islice(self._bodies, self._concurrency))

    def after(self, ended: SimRequest, now_s: float) -> SimRequest | None:
        body = next(self._bodies, None)
        return None if body is None else body._replace(arrival_s=now_s)
