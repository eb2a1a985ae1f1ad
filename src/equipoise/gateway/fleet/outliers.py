"""Outliers: a worker that fails far more often than its peers, or takes far longer to the first token, is left out.

A breaker sees one worker alone; this sees it beside its peers, so that a fault that all have (a bad deployment, long
prompts) ejects nobody. Each worker keeps a record of the requests of one interval; at its end `Judge.judge` compares
the records of the workers of one group and names those to eject. Pure: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """What an outlier is, and for how long it is left out.

    interval_s: seconds from one judgement to the next; 0: nobody is ever judged
    min_requests: a worker with fewer ended requests in the interval is not judged, nor is one with fewer than
        two such peers
    max_failure_excess: ejected when its share of failed requests is over its peers' median by more than this
    max_ttft_ratio: ejected when its mean time to the first token is over its peers' median by more than this factor ...
    min_ttft_excess_s: ... and by more than these seconds
    eject_s: seconds of the first ejection; each further one is longer by as much, up to max_eject_s
    max_ejected_share: of the workers of a group, rounded down
    """

    interval_s: float = 10.0
    min_requests: int = 20
    max_failure_excess: float = 0.3
    max_ttft_ratio: float = 5.0
    min_ttft_excess_s: float = 1.0
    eject_s: float = 15.0
    max_eject_s: float = 300.0
    max_ejected_share: float = 0.34


class Record:
    """What one worker did in the interval under way, and its ejections."""

    __slots__ = ("ejected_until", "num_ejections", "num_failed", "num_ok", "num_ttfts", "sum_ttft_s")

    def __init__(self) -> None:
        self.ejected_until = -inf
        self.num_ejections = 0
        """Ejections of late; one is forgotten for each interval that the worker passes."""
        self.forget()

    def forget(self) -> None:
        """Begin a new interval."""
        self.num_ok = self.num_failed = self.num_ttfts = 0
        self.sum_ttft_s = 0.0

    def succeeded(self, ttft_s: float | None) -> None:
        """A request was answered, its first token after `ttft_s` seconds (None: not known)."""
        self.num_ok += 1
        if ttft_s is not None:
            self.num_ttfts += 1
            self.sum_ttft_s += ttft_s

    def failed(self) -> None:
        """A request failed for a reason that is the worker's."""
        self.num_failed += 1

    @property
    def num_requests(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def failure_share(self) -> float:
        return self.num_failed / self.num_requests if self.num_requests else 0.0

    @property
    def mean_ttft_s(self) -> float:
        return self.sum_ttft_s / self.num_ttfts if self.num_ttfts else 0.0


class Judge:
    """Compares the records of one group of peers."""

    __slots__ = ("limits",)

    def __init__(self, limits: OutlierLimits) -> None:
        self.limits = limits

    def judge(self, records: Sequence[Record], now: float) -> list[int]:
        """End the interval: eject the outliers among `records`, the worst first, and start a new interval for all.

        Answers the places of the newly ejected. Never are more than max_ejected_share of all out at once."""
        num_out = sum(record.ejected_until > now for record in records)
        room = int(len(records) * self.limits.max_ejected_share) - num_out
        judged = [place for place, record in enumerate(records) if self._is_judged(record, now)]
        found = sorted((-excess, place) for place in judged if (excess := self._excess(records, judged, place)) > 0.0)
        ejected = [place for _, place in found[: max(0, room)]]
        for place, record in enumerate(records):
            self._settle(record, place in ejected, place in judged, now)
        return ejected

    def _settle(self, record: Record, is_ejected: bool, is_judged: bool, now: float) -> None:
        if is_ejected:
            record.num_ejections += 1
            record.ejected_until = now + min(self.limits.eject_s * record.num_ejections, self.limits.max_eject_s)
        elif is_judged and record.num_ejections:
            record.num_ejections -= 1
        record.forget()

    def _is_judged(self, record: Record, now: float) -> bool:
        return record.num_requests >= self.limits.min_requests and record.ejected_until <= now

    def _excess(self, records: Sequence[Record], judged: Sequence[int], place: int) -> float:
        """How far a record is beyond what is tolerated, as a multiple of it; 0 where it is not."""
        peers = [records[other] for other in judged if other != place]
        if len(peers) < 2:
            return 0.0
        own, limits = records[place], self.limits
        excess = own.failure_share - median(peer.failure_share for peer in peers)
        score = excess / limits.max_failure_excess if excess > limits.max_failure_excess else 0.0
        peers_s = [peer.mean_ttft_s for peer in peers if peer.num_ttfts]
        if len(peers_s) < 2:
            return score
        usual_s = median(peers_s)
        allowed_s = max(usual_s * limits.max_ttft_ratio, usual_s + limits.min_ttft_excess_s)
        return max(score, own.mean_ttft_s / allowed_s) if own.mean_ttft_s > allowed_s else score
