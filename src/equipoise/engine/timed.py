"""An executor that keeps when its steps began and ended: it stands where the steps are submitted and awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from equipoise.clock import Clock
    from equipoise.exec.protocol import Executor, ExecutorInfo, StepHandle, StepOutput
    from equipoise.obs.timeline import StepRing
    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.scheduler import Scheduler

LOAD_EVERY = 8
"""Steps of decodes alone between two looks at the load, which costs more than all else that is kept of a step."""
NOT_READ = (-1, -1, "")


class TimedExecutor:
    """`executor`, whose steps go into `ring` as they end. A step begins when it is submitted, or when the one before
    it has ended; it ends when the loop has its result. Steps without rows are not kept. Counters are of its end."""

    def __init__(self, executor: Executor, scheduler: Scheduler, ring: StepRing, clock: Clock) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._keep = ring.keep
        self._clock = clock
        self._landed_at = clock.now()
        self._until_load = 0

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def bind(self, columns: Columns) -> None:
        self._executor.bind(columns)

    def prepare(self, request: Request) -> Future[None] | None:
        return self._executor.prepare(request)

    def submit(self, plan: StepPlan) -> StepHandle:
        return TimedStep(self._executor.submit(plan), plan, self._clock.now(), self)

    def submit_idle(self) -> StepHandle:
        return self._executor.submit_idle()

    def forget(self, request: Request) -> None:
        self._executor.forget(request)

    def close(self) -> None:
        self._executor.close()

    def landed(self, plan: StepPlan, submitted_at: float, wait_s: float) -> None:
        """A step ended."""
        now, last = self._clock.now(), self._landed_at
        self._landed_at = now
        self._until_load -= 1
        if plan.prefills or self._until_load <= 0:
            self._until_load = LOAD_EVERY
            load = self._scheduler.load()
            counters = load.num_used_tokens, load.num_waiting, self._scheduler.held_by
        else:
            counters = NOT_READ
        num_decodes = len(plan.decode_seats)
        self._keep(
            (
                submitted_at if submitted_at > last else last,
                now,
                wait_s,
                plan.num_tokens - num_decodes,
                len(plan.prefills),
                num_decodes,
                *counters,
            )
        )


class TimedStep:
    """A step under way."""

    __slots__ = ("_executor", "_handle", "_plan", "_submitted_at")

    def __init__(self, handle: StepHandle, plan: StepPlan, submitted_at: float, executor: TimedExecutor) -> None:
        self._handle = handle
        self._plan = plan
        self._submitted_at = submitted_at
        self._executor = executor

    def done(self) -> bool:
        """True when `result` would not wait."""
        return self._handle.done()

    def result(self) -> StepOutput:
        """Wait for the step. Raises what the step raised."""
        output = self._handle.result()
        self._executor.landed(self._plan, self._submitted_at, output.wait_s)
        return output
