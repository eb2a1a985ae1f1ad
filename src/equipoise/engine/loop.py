"""The loop of a rank: messages in, plans to the executor, one message out per step.

    receive ──> wake what was prepared ──> expire ──> meet the group ──> launch a plan ──> land the oldest ──> publish

Up to `scheduler.depth` plans run ahead of the results: with depth 1 the next step is planned and submitted
while the executor works on this one.

In lockstep a rank meets the others of its group in every turn in which one of them has something to run or to land,
and launches a step then, without rows if its plan is empty. There is one such place in a turn, after the step of the
turn before, and nothing on the way to it depends on what this rank has to run.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.engine.exchange import Alone
from equipoise.engine.load import LoadMeter
from equipoise.engine.messages import (
    Abort,
    Add,
    Call,
    Finished,
    PromptLogprobs,
    RankLoad,
    Reply,
    RowLogprobs,
    Step,
    Stop,
)
from equipoise.errors import InvalidValueError, RequestError
from equipoise.request import Request
from equipoise.sched.plan import StepPlan

if TYPE_CHECKING:
    from concurrent.futures import Future

    from equipoise.clock import Clock
    from equipoise.engine.channel import LoopChannel
    from equipoise.engine.exchange import Exchange
    from equipoise.engine.messages import ToRank
    from equipoise.exec.protocol import Executor, StepHandle, StepOutput
    from equipoise.obs.timeline import StepRing
    from equipoise.sched.plan import StepResult
    from equipoise.sched.scheduler import Scheduler

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""Seconds to wait when there is work but no plan came of it."""

IDLE = StepPlan(0)
"""What a rank of a lockstep group runs when it has nothing to run and others have."""

STEP_TIME_WEIGHT = 0.2
"""Weight of the newest step in the moving average of step times."""


class EngineLoop:
    """Runs one rank in the calling thread, until a Stop message."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        channel: LoopChannel,
        clock: Clock,
        dp_rank: int = 0,
        exchange: Exchange | None = None,
        timeline: StepRing | None = None,
    ) -> None:
        """`exchange`: with the other ranks of a lockstep group; None for a rank by itself. `timeline`: where the
        executor keeps its last steps, if it does."""
        self._scheduler = scheduler
        self._executor = executor
        self._channel = channel
        self._clock = clock
        self._exchange: Exchange = exchange or Alone()
        self._timeline = timeline
        self._meter = LoadMeter(scheduler, dp_rank, self._exchange)
        self._outstanding: deque[tuple[StepPlan, StepHandle, float]] = deque()
        self._preparing: dict[int, Future[None]] = {}
        self._ended: list[Finished] = []
        self._num_real = 0  # outstanding steps that have rows
        self._num_added = 0
        self._has_news = False  # requests came or ended since the last message
        self._is_idle = True
        self._has_preempted = False
        self._is_stopping = False
        self._landed_at = clock.now()
        executor.bind(scheduler.columns)

    # ---------------------------------------------------------------- start, loop, stop

    def run(self) -> None:
        """Serve until told to stop. Raises what a step raised: the rank cannot go on then."""
        while not self._is_stopping:
            self.turn()
        self._exchange.leave()
        while self._outstanding:
            self._land()

    def turn(self) -> None:
        """One round: at most one plan is launched and at most one landed."""
        self._receive()
        self._settle_prepared()
        self._expire()
        launched = self._launch()
        must_land = len(self._outstanding) > self._scheduler.depth or (self._num_real > 0 and not launched)
        if must_land:
            self._land()
        if self._has_news:
            self._publish()
        # A step that landed, or a plan that came to nothing but preemptions, may have made room for another.
        self._is_idle = not self._num_real and not must_land and not self._has_preempted

    def load(self) -> RankLoad:
        """The rank's load now."""
        return self._meter.measure()

    # ---------------------------------------------------------------- messages in

    def _receive(self) -> None:
        """Take every message that is there; wait for one only when there is nothing else to do."""
        may_wait = self._is_idle and self._exchange.rest()
        message = self._channel.receive(self._patience() if may_wait else 0)
        while message is not None:
            self._handle(message)
            message = self._channel.receive(0)

    def _patience(self) -> float | None:
        """Seconds until something may have to be done without a message; None for never."""
        if self._scheduler.has_work:
            return RETRY_S
        deadline = self._scheduler.next_deadline_s
        return None if deadline is None else max(0.0, deadline - self._clock.now())

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            for handle in message.handles:
                self._end(handle, Finished(handle, message.reason))
        elif isinstance(message, Call):
            self._answer(message)
        elif isinstance(message, Stop):
            self._is_stopping = True

    def _add(self, message: Add) -> None:
        """Hand a request to the scheduler; one that cannot be served ends at once, with the reason."""
        self._has_news = True
        self._num_added += 1
        try:
            request = self._request(message)
            prepared = self._executor.prepare(request)
            self._scheduler.add(request, wait_for=None if prepared is None else "grammar")
        except RequestError as error:
            self._ended.append(_failure(message.handle, error))
            return
        if prepared is not None:
            self._preparing[message.handle] = prepared
            prepared.add_done_callback(lambda _: self._channel.poke())

    def _request(self, message: Add) -> Request:
        now = self._clock.now()
        return Request(
            message.handle,
            message.request_id,
            np.frombuffer(message.prompt, np.int32),
            message.params,
            max_model_len=self._scheduler.max_model_len,
            eos_ids=self._executor.info.eos_ids,
            arrival_s=now,
            priority=message.priority,
            cache_salt=message.cache_salt,
            deadline_s=None if message.timeout_s is None else now + message.timeout_s,
        )

    def _answer(self, call: Call) -> None:
        try:
            value = self._call(call)
        except InvalidValueError as error:
            self._channel.send(Reply(call.call_id, error=error.message))
        else:
            if call.method != "ping":
                self._publish()  # before the reply: who waits for it finds the new load
            self._channel.send(Reply(call.call_id, value))

    def _call(self, call: Call) -> Any:
        match call.method:
            case "flush_cache":
                return self._scheduler.flush_cache()
            case "pause":
                mode = call.args.get("mode", "new")
                if mode not in ("new", "all"):
                    raise InvalidValueError(f"mode: {mode!r} must be 'new' or 'all'", "mode")
                self._scheduler.pause(mode)
                log.info("paused: %s", mode)
            case "resume":
                self._scheduler.resume()
                log.info("resumed")
            case "loads":
                return self.load()
            case "explain":
                return self._scheduler.explain(str(call.args.get("request_id", "")))
            case "decisions":
                return None if self._scheduler.trace is None else self._scheduler.trace.decisions()
            case "timeline":
                return None if self._timeline is None else self._timeline.steps()
        return None

    # ---------------------------------------------------------------- events without a message

    def _settle_prepared(self) -> None:
        """Wake the requests whose preparation is done; end those for which it failed."""
        for handle in [handle for handle, future in self._preparing.items() if future.done()]:
            error = self._preparing.pop(handle).exception()
            if error is None:
                self._scheduler.wake(handle)
                continue
            if not isinstance(error, RequestError):
                log.error("preparing request #%d failed", handle, exc_info=error)
            self._end(handle, _failure(handle, error))

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        for request in self._scheduler.expire():
            seconds = (request.deadline_s or 0.0) - request.arrival_s
            message = f"the request did not end within its timeout of {seconds:g} s"
            self._forget(request, Finished(request.handle, "error", request.num_cached, error=message, status=408))

    # ---------------------------------------------------------------- steps

    def _launch(self) -> bool:
        """Plan and submit a step; False when there is none to take part in."""
        self._has_preempted = False
        has_work = self._scheduler.has_work
        if self._is_stopping or not self._exchange.is_due(has_work=has_work or self._num_real > 0):
            return False
        ranks = self._exchange.meet(self._scheduler.state)
        if has_work:
            plan = self._scheduler.schedule(ranks)
            self._has_preempted = bool(plan.preempted)
            if not plan.is_empty:
                self._num_real += 1
                self._outstanding.append((plan, self._executor.submit(plan), self._clock.now()))
                return True
        elif ranks is not None:
            self._scheduler.look(ranks)
        if ranks is None:
            return False
        self._outstanding.append((IDLE, self._executor.submit_idle(), self._clock.now()))
        return True

    def _land(self) -> None:
        """Wait for the oldest outstanding step, reconcile and publish."""
        plan, handle, submitted_at = self._outstanding.popleft()
        output = handle.result()
        if plan is IDLE:
            return
        self._num_real -= 1
        self._meter.wait_s += output.wait_s
        self._time_step(submitted_at)
        for failed, error in output.failed.items():
            self._end(failed, Finished(failed, "error", error=error, status=400))
        result = self._scheduler.apply(plan, output)
        for request in result.finished:
            self._forget(request, _finished(request))
        self._publish(result, output, _cached(plan))

    def _time_step(self, submitted_at: float) -> None:
        now = self._clock.now()
        seconds = now - max(submitted_at, self._landed_at)
        self._landed_at = now
        average = self._meter.step_s or seconds
        self._meter.step_s = average + STEP_TIME_WEIGHT * (seconds - average)

    # ---------------------------------------------------------------- ends, and messages out

    def _end(self, handle: int, finished: Finished) -> None:
        """End a request, if it has not ended by itself."""
        request = self._scheduler.abort(handle, finished.reason)
        if request is not None:
            finished.num_cached = request.num_cached
            self._forget(request, finished)

    def _forget(self, request: Request, finished: Finished) -> None:
        """A request ended: drop what is kept for it and report it."""
        self._executor.forget(request)
        prepared = self._preparing.pop(request.handle, None)
        if prepared is not None:
            prepared.cancel()
        self._ended.append(finished)
        self._has_news = True

    def _publish(
        self, result: StepResult | None = None, output: StepOutput | None = None, cached: dict[int, int] | None = None
    ) -> None:
        """Send what a step delivered, who ended since the last message, and the load."""
        message = Step(b"", b"", self.load(), self._num_added, self._ended, cached=cached or {})
        if result is not None and output is not None:
            message.handles = result.handles.astype("<i8", copy=False).tobytes()
            message.tokens = result.tokens.astype("<i4", copy=False).tobytes()
            message.logprobs = _row_logprobs(result, output)
            message.prompt_logprobs = [PromptLogprobs(*item) for item in output.prompt_logprobs.items()]
        self._channel.send(message)
        self._ended = []
        self._has_news = False


def _row_logprobs(result: StepResult, output: StepOutput) -> list[RowLogprobs]:
    """Logprobs of the tokens that were delivered, by their place in the message."""
    if not output.logprobs:
        return []
    rows = enumerate(result.rows.tolist())
    return [RowLogprobs(index, output.logprobs[row]) for index, row in rows if row in output.logprobs]


def _cached(plan: StepPlan) -> dict[int, int]:
    """Cached prompt tokens of the requests whose prompt ended in this plan."""
    ends = (row.request for row in plan.prefills if row.samples)
    return {request.handle: request.num_cached for request in ends if request.num_cached}


def _finished(request: Request) -> Finished:
    reason = request.finish_reason
    assert reason is not None
    stop_id = request.output_ids[-1] if reason == "stop" else None
    return Finished(request.handle, reason, request.num_cached, stop_id)


def _failure(handle: int, error: BaseException) -> Finished:
    if isinstance(error, RequestError):
        return Finished(handle, "error", error=error.message, field=error.field, status=error.status)
    return Finished(handle, "error", error=f"{type(error).__name__}: {error}", status=500)
