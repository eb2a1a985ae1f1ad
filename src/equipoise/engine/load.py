"""A rank's load as it is published."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from equipoise.engine.messages import GroupLoad, RankLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from equipoise.engine.exchange import Exchange
    from equipoise.sched.scheduler import Scheduler

WINDOW_S = 1.0
"""Throughput is measured over windows of about this length."""


class LoadMeter:
    """Reads a scheduler's counters and turns them into rates.

    step_s: of the last steps, on average
    wait_s: seconds of all steps in which this rank had done its part and waited for its group"""

    def __init__(
        self, scheduler: Scheduler, dp_rank: int, exchange: Exchange, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._scheduler = scheduler
        self._exchange = exchange
        self._dp_rank = dp_rank
        self._unix_time = unix_time
        self._window_start = unix_time()
        self._window_tokens = 0
        self._throughput = 0.0
        self.step_s = 0.0
        self.wait_s = 0.0

    def measure(self) -> RankLoad:
        """Load now, in O(1)."""
        now = self._unix_time()
        load, totals = self._scheduler.load(), self._scheduler.totals
        return RankLoad(
            dp_rank=self._dp_rank,
            timestamp=now,
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_waiting_tokens=load.num_waiting_tokens,
            num_waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            num_prefilling_tokens=load.num_prefilling_tokens,
            num_inflight_rows=load.num_inflight_rows,
            num_expected_output_tokens=load.num_expected_output_tokens,
            num_reserved_tokens=load.num_reserved_tokens,
            num_sent_reqs=load.num_sent_reqs,
            num_sent_tokens=load.num_sent_tokens,
            num_used_tokens=load.num_used_tokens,
            num_tokens=load.num_used_tokens + load.num_waiting_tokens,
            max_total_num_tokens=load.num_total_tokens,
            max_running_requests=load.max_running,
            token_usage=load.num_used_tokens / load.num_total_tokens,
            gen_throughput=self._rate(now, totals.output_tokens),
            cache_hit_rate=totals.cached_tokens / max(1, totals.prompt_tokens),
            total_steps=totals.steps,
            total_prompt_tokens=totals.prompt_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_output_tokens=totals.output_tokens,
            total_preemptions=totals.preemptions,
            total_finished=totals.finished,
            total_aborted=totals.aborted,
            step_ms=self.step_s * 1e3,
            paused=self._scheduler.paused,
            group=self._group(),
        )

    def _group(self) -> GroupLoad | None:
        totals = self._exchange.totals
        return GroupLoad(totals.num, totals.seconds, self.wait_s) if totals.num else None

    def _rate(self, now: float, num_tokens: int) -> float:
        """Output tokens per second over the last full window."""
        elapsed = now - self._window_start
        if elapsed >= WINDOW_S:
            self._throughput = (num_tokens - self._window_tokens) / elapsed
            self._window_start, self._window_tokens = now, num_tokens
        return self._throughput
