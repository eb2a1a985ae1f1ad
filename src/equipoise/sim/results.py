"""What became of requests: a few numbers each, in flat arrays, so that a million fit."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.sim.step_log import LossSink, StepSink
    from equipoise.sim.workload.request import SimRequest

    Floats = NDArray[np.floating[Any]]

NEVER = math.nan

BINS_PER_DECADE = 200
LEAST_GAP_S, DECADES = 1e-5, 8
EDGES: list[float] = [LEAST_GAP_S * 10 ** (i / BINS_PER_DECADE) for i in range(BINS_PER_DECADE * DECADES + 1)]
_EDGES = np.array(EDGES)


PS = 1e12
"""Sums are kept in whole picoseconds: they do not depend on the order in which they were added up."""


def _ps(seconds: Floats) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = np.rint(seconds * PS).astype(np.int64)
    return whole


MOST_UNSORTED = 1 << 16


class GapHistogram:
    """Gaps between tokens, in bins 1.2% wide: counts, so that their number does not matter."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES) + 1)
        self._num = 0
        self._sum_ps = 0
        self._unsorted: list[tuple[Floats, int]] = []
        self._num_unsorted = 0

    def add(self, gap_s: float, count: int) -> None:
        """`count` tokens came `gap_s` after the ones before."""
        self._counts[bisect_right(EDGES, gap_s)] += count
        self._num += count
        self._sum_ps += round(gap_s * PS) * count

    def add_each(self, gaps_s: Floats, count: int) -> None:
        """`add(gap, count)` for each of `gaps_s`."""
        self._unsorted.append((gaps_s, count))
        self._num_unsorted += len(gaps_s)
        if self._num_unsorted >= MOST_UNSORTED:
            self._sort()

    @property
    def num(self) -> int:
        """How many gaps there were."""
        self._sort()
        return self._num

    @property
    def sum_ps(self) -> int:
        """Their sum."""
        self._sort()
        return self._sum_ps

    @property
    def counts(self) -> list[int]:
        """How many are in each bin: below EDGES[0], from there to EDGES[1], and so on."""
        self._sort()
        return self._counts

    def _sort(self) -> None:
        """Count what `add_each` was given: many at once, since each numpy call has its price."""
        if not self._unsorted:
            return
        gaps_s = np.concatenate([gaps for gaps, _ in self._unsorted])
        lengths = [len(gaps) for gaps, _ in self._unsorted]
        times = [count for _, count in self._unsorted]
        bins = np.searchsorted(_EDGES, gaps_s, side="right")
        sums = np.bincount(bins, np.repeat(times, lengths), len(self._counts))
        self._counts = [count + int(more) for count, more in zip(self._counts, sums.tolist(), strict=True)]
        self._num += sum(map(mul, lengths, times))
        starts = np.cumsum([0, *lengths[:-1]])
        self._sum_ps += sum(map(mul, np.add.reduceat(_ps(gaps_s), starts).tolist(), times))
        self._unsorted, self._num_unsorted = [], 0

    def percentile(self, share: float) -> float:
        """The gap that `share` (0 to 1) of all gaps do not exceed, to 1.2%; NaN without gaps."""
        if not self.num:
            return NEVER
        upto, wanted = 0, share * self._num
        for index, count in enumerate(self._counts):
            upto += count
            if count and upto >= wanted:
                return EDGES[min(index, len(EDGES) - 1)]
        return EDGES[-1]


class Requests:
    """Columns by request, in order of arrival; times in seconds, lengths in tokens, NaN for what did not happen."""

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.admitted_s = array("d")
        self.first_s = array("d")
        self.last_s = array("d")
        self.prompt_len = array("q")
        self.output_len = array("q")
        self.num_cached = array("q")
        self.num_preemptions = array("q")
        self.worker = array("q")
        self.rank = array("q")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def add(self, request: SimRequest, arrival_s: float) -> int:
        """A request arrived; returns its index."""
        self.arrival_s.append(arrival_s)
        for column in (self.admitted_s, self.first_s, self.last_s):
            column.append(NEVER)
        self.prompt_len.append(request.prompt_len)
        self.output_len.append(request.output_len)
        for numbers in (self.num_cached, self.num_preemptions):
            numbers.append(0)
        self.worker.append(-1)
        self.rank.append(-1)
        return len(self.arrival_s) - 1

    def columns(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """All columns by name."""
        names = ("arrival_s", "admitted_s", "first_s", "last_s")
        numbers = ("prompt_len", "output_len", "num_cached", "num_preemptions", "worker", "rank")
        return {name: np.array(getattr(self, name)) for name in (*names, *numbers)}


class Steps:
    """Sums over the steps of all ranks.

    sinks: they are told of every step of every rank; `loss_sinks`: of what was lost to the slowest rank in each
    """

    def __init__(self, sinks: Sequence[StepSink] = (), loss_sinks: Sequence[LossSink] = ()) -> None:
        self.sinks = sinks
        self.loss_sinks = loss_sinks
        self.num_steps = 0
        self.num_prefill_steps = 0
        self.num_leapt = 0
        self.busy_ps = 0
        self.lost_ps = {"prefill": 0, "seats": 0, "kv": 0}
        self.gaps = GapHistogram()

    @property
    def busy_s(self) -> float:
        """Rank-seconds in steps."""
        return self.busy_ps / PS

    @property
    def lost_s(self) -> dict[str, float]:
        """Rank-seconds that ranks of lockstep groups waited for their slowest, by what made it slow."""
        return {part: lost_ps / PS for part, lost_ps in self.lost_ps.items()}

    def lose(self, part: str, lost_s: Floats) -> None:
        """Steps of a group lost so many rank-seconds by `part`."""
        self.lost_ps[part] += int(_ps(lost_s).sum())

    def count(self, step_s: float, num_ranks: int, *, any_prefill: bool) -> None:
        """A step of a group of `num_ranks` took so long."""
        self.num_steps += 1
        self.num_prefill_steps += any_prefill
        self.busy_ps += round(step_s * PS) * num_ranks

    def count_leapt(self, step_s: Floats, num_ranks: int) -> None:
        """So many steps of a group of `num_ranks`, without a prefill, took so long each."""
        self.num_steps += len(step_s)
        self.num_leapt += len(step_s)
        self.busy_ps += int(_ps(step_s).sum()) * num_ranks


PERCENTILES = (50, 90, 95, 99)


def spread_of(name: str, values_ms: Floats) -> dict[str, float]:
    """Mean and percentiles of milliseconds, by name; NaN without values."""
    if not len(values_ms):
        return {f"{name}_{part}_ms": NEVER for part in ("mean", *(f"p{p}" for p in PERCENTILES))}
    row = {f"{name}_mean_ms": float(values_ms.mean())}
    return row | {f"{name}_p{p}_ms": float(np.percentile(values_ms, p)) for p in PERCENTILES}


class Outcomes(NamedTuple):
    """By request, in order of arrival; NaN for what did not happen, like a TPOT of one token.

    is_good: it ended, and met both objectives"""

    is_done: NDArray[np.bool_]
    ttft_ms: Floats
    queue_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    is_good: NDArray[np.bool_]


def outcomes(requests: Requests, ttft_ms: float, tpot_ms: float) -> Outcomes:
    """What became of each request, with objectives in milliseconds."""
    columns = requests.columns()
    arrival, first, last = columns["arrival_s"], columns["first_s"], columns["last_s"]
    is_done = ~np.isnan(last)
    gaps = columns["output_len"] - 1
    ttft = np.where(is_done, (first - arrival) * 1e3, NEVER)
    tpot = np.where(gaps > 0, (last - first) / np.maximum(gaps, 1) * 1e3, NEVER)
    is_good = is_done & (ttft <= ttft_ms) & ~(tpot > tpot_ms)
    queue = np.where(is_done, (columns["admitted_s"] - arrival) * 1e3, NEVER)
    return Outcomes(is_done, ttft, queue, tpot, (last - arrival) * 1e3, is_good)


def summary(requests: Requests, steps: Steps, num_ranks: int, ttft_ms: float, tpot_ms: float) -> dict[str, float]:
    """One number per question; milliseconds, seconds, tokens.

    goodput: requests per second that met both objectives. lost shares: of all ranks' time in steps."""
    columns = requests.columns()
    arrival, last = columns["arrival_s"], columns["last_s"]
    found = outcomes(requests, ttft_ms, tpot_ms)
    done, is_good = found.is_done, found.is_good[found.is_done]
    out = columns["output_len"][done]
    start = float(arrival.min()) if len(arrival) else 0.0
    duration = float(last[done].max()) - start if done.any() else 0.0
    per_s = 1 / duration if duration else 0.0
    result = {
        "num_requests": len(requests),
        "num_finished": int(done.sum()),
        "num_refused": int((~done).sum()),
        "duration_s": duration,
        "throughput_tok_s": float(out.sum()) * per_s,
        "total_throughput_tok_s": float(out.sum() + columns["prompt_len"][done].sum()) * per_s,
        "throughput_req_s": float(done.sum()) * per_s,
        "goodput_req_s": float(is_good.sum()) * per_s,
        "good_share": float(is_good.mean()) if len(is_good) else NEVER,
    }
    result |= spread_of("ttft", found.ttft_ms[done])
    result |= spread_of("queue", found.queue_ms[done])
    result |= spread_of("tpot", found.tpot_ms[done & (columns["output_len"] > 1)])
    result |= spread_of("e2e", found.e2e_ms[done])
    gaps = steps.gaps
    result["itl_mean_ms"] = gaps.sum_ps / PS / gaps.num * 1e3 if gaps.num else NEVER
    result |= {f"itl_p{p}_ms": gaps.percentile(p / 100) * 1e3 for p in PERCENTILES}
    cached, prompts = columns["num_cached"].sum(), columns["prompt_len"].sum()
    result |= {
        "num_preemptions": int(columns["num_preemptions"].sum()),
        "prefix_hit_share": float(cached / prompts) if prompts else NEVER,
        "num_steps": steps.num_steps,
        "num_prefill_steps": steps.num_prefill_steps,
        "busy_share": steps.busy_s / (duration * num_ranks) if duration else NEVER,
    }
    for part, lost_s in steps.lost_s.items():
        result[f"lost_to_{part}_share"] = lost_s / steps.busy_s if steps.busy_s else NEVER
    result["lost_share"] = sum(steps.lost_s.values()) / steps.busy_s if steps.busy_s else NEVER
    return result
