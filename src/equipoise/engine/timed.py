"""An executor that keeps when its steps began and ended: it stands where the steps are submitted and awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.obs.timeline import StepSpan

if TYPE_CHECKING:
    from concurrent.futures import Future

    from equipoise.clock import Clock
    from equipoise.exec.protocol import Executor, ExecutorInfo, StepHandle, StepOutput
    from equipoise.obs.timeline import StepRing
    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import StepPlan
    from equipoise.sched.scheduler import Scheduler


class TimedExecutor:
    """`executor`, whose steps go into `ring` as they end. A step begins when it is submitted, or when the one before
    it has ended; it ends when the loop has its result. Steps without rows are not kept."""

    def __init__(self, executor: Executor, scheduler: Scheduler, ring: StepRing, clock: Clock) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._ring = ring
        self._clock = clock
        self._landed_at = clock.now()

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def bind(self, columns: Columns) -> None:
        self._executor.bind(columns)

    def prepare(self, request: Request) -> Future[None] | None:
        return self._executor.prepare(request)

    def submit(self, plan: StepPlan) -> StepHandle:
        submitted_at = self._clock.now()
        return TimedStep(self, self._executor.submit(plan), plan, submitted_at)

    def submit_idle(self) -> StepHandle:
        return self._executor.submit_idle()

    def forget(self, request: Request) -> None:
        self._executor.forget(request)

    def close(self) -> None:
        self._executor.close()

    def landed(self, step: TimedStep, wait_s: float) -> None:
        """A step ended."""
        now, last = self._clock.now(), self._landed_at
        self._landed_at = now
        begins_s = step.submitted_at if step.submitted_at > last else last
        self._ring.append(StepSpan(begins_s, now, wait_s, *step.load))

    def load_of(self, plan: StepPlan) -> tuple[int, int, int, int, int, int, str]:
        """What the step computes, and what there is beside it."""
        scheduler = self._scheduler
        load, num_decodes = scheduler.load(), len(plan.decode_seats)
        return (
            plan.num_tokens - num_decodes,
            len(plan.prefills),
            num_decodes,
            load.num_used_tokens,
            load.num_running,
            load.num_waiting,
            scheduler.held_by,
        )


class TimedStep:
    """A step under way."""

    __slots__ = ("_executor", "_handle", "load", "submitted_at")

    def __init__(self, executor: TimedExecutor, handle: StepHandle, plan: StepPlan, submitted_at: float) -> None:
        self._executor = executor
        self._handle = handle
        self.submitted_at = submitted_at
        self.load = executor.load_of(plan)

    def done(self) -> bool:
        """True when `result` would not wait."""
        return self._handle.done()

    def result(self) -> StepOutput:
        """Wait for the step. Raises what the step raised."""
        output = self._handle.result()
        self._executor.landed(self, output.wait_s)
        return output
