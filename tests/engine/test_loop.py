"""The engine loop in-process: real scheduler and sim executor on virtual time, messages in lists."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pytest

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, EngineConfig, SchedulerConfig, SimExecutorConfig
from equipoise.engine.loop import EngineLoop
from equipoise.engine.messages import Abort, Add, Call, Finished, FromRank, RankLoad, Reply, Step, Stop, ToRank
from equipoise.errors import InvalidValueError
from equipoise.exec.cost import LinearCost
from equipoise.exec.sim import SimExecutor, SimStep, sim_info
from equipoise.request import Grammar, SamplingParams
from equipoise.sched.assemble import build_scheduler

if TYPE_CHECKING:
    from equipoise.exec.protocol import StepOutput
    from equipoise.request import Request
    from equipoise.sched.plan import StepPlan

STEP_S = 1.0


class ListChannel:
    """A pipe whose rank end is called directly. A wait for ever with nothing to come is a test's mistake."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.incoming: deque[ToRank] = deque()
        self.sent: list[FromRank] = []
        self.waits: list[float | None] = []
        self.num_pokes = 0

    def receive(self, timeout_s: float | None) -> ToRank | None:
        if self.incoming:
            return self.incoming.popleft()
        if timeout_s != 0:
            self.waits.append(timeout_s)
            self.clock.advance(timeout_s or 0.0)
        return None

    def send(self, message: FromRank) -> None:
        self.sent.append(message)

    def poke(self) -> None:
        self.num_pokes += 1


class SlowGrammars(SimExecutor):
    """Grammars are prepared when the test says so; rows may fail."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.preparing: dict[int, Future[None]] = {}
        self.forgotten: list[int] = []
        self.fails: dict[int, str] = {}

    def prepare(self, request: Request) -> Future[None] | None:
        if request.params.grammar is None:
            return None
        self.preparing[request.handle] = Future()
        return self.preparing[request.handle]

    def submit(self, plan: StepPlan) -> SimStep:
        step = super().submit(plan)
        step._output.failed.update(self.fails)
        return step

    def forget(self, request: Request) -> None:
        super().forget(request)
        self.forgotten.append(request.handle)


class Rig:
    """A loop with its surroundings."""

    def __init__(self, depth: int = 1, **limits: object) -> None:
        config = EngineConfig(
            cache=CacheConfig(page_size=4, num_pages=64),
            sim=SimExecutorConfig(sim_vocab_size=50, sim_max_model_len=200),
            scheduler=SchedulerConfig(depth=depth, **limits),  # type: ignore[arg-type]
        )
        self.clock = VirtualClock()
        self.channel = ListChannel(self.clock)
        self.executor = SlowGrammars(sim_info(config), LinearCost(STEP_S), self.clock)
        self.scheduler = build_scheduler(config.scheduler, config.cache, self.executor.info, self.clock)
        self.loop = EngineLoop(self.scheduler, self.executor, self.channel, self.clock)

    def add(self, handle: int, prompt: list[int], timeout_s: float | None = None, **params: object) -> None:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        ids = np.array(prompt, np.int32).tobytes()
        self.channel.incoming.append(Add(handle, f"r{handle}", ids, sampling, timeout_s=timeout_s))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()

    def until_idle(self, most: int = 500) -> None:
        for _ in range(most):
            self.loop.turn()
            if self.loop._is_idle and not self.channel.incoming:
                return
        pytest.fail(f"still busy after {most} turns")

    @property
    def steps(self) -> list[Step]:
        return [message for message in self.channel.sent if isinstance(message, Step)]

    def tokens(self, handle: int) -> list[int]:
        found: list[int] = []
        for step in self.steps:
            handles = np.frombuffer(step.handles, np.int64)
            found += np.frombuffer(step.tokens, np.int32)[handles == handle].tolist()
        return found

    def finished(self) -> dict[int, Finished]:
        return {each.handle: each for step in self.steps for each in step.finished}

    def replies(self) -> dict[int, Reply]:
        return {message.call_id: message for message in self.channel.sent if isinstance(message, Reply)}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_and_ends_arrive(depth: int) -> None:
    rig = Rig(depth)
    for handle in range(1, 6):
        rig.add(handle, [handle] * handle, max_tokens=handle * 2)
    rig.until_idle()
    assert {handle: len(rig.tokens(handle)) for handle in range(1, 6)} == {h: 2 * h for h in range(1, 6)}
    assert {h: f.reason for h, f in rig.finished().items()} == dict.fromkeys(range(1, 6), "length")
    assert sorted(rig.executor.forgotten) == [1, 2, 3, 4, 5]
    assert not any(wait for wait in rig.channel.waits)
    reference = Rig(0)
    reference.add(3, [3, 3, 3], max_tokens=6)
    reference.until_idle()
    assert rig.tokens(3) == reference.tokens(3)


def test_every_message_says_how_many_requests_its_load_includes() -> None:
    rig = Rig(max_running=1)
    rig.add(1, [1, 2, 3], max_tokens=3)
    rig.add(2, [1] * 500, max_tokens=3)  # too long: received all the same
    rig.turn(2)
    rig.add(3, [4, 5], max_tokens=2)
    rig.until_idle()
    told = [(step.num_added, step.load.num_waiting_reqs) for step in rig.channel.sent if isinstance(step, Step)]
    assert [num_added for num_added, _ in told] == sorted(num_added for num_added, _ in told)
    assert {num_added for num_added, _ in told} == {2, 3}
    assert all(num_waiting == 0 for num_added, num_waiting in told if num_added == 2)
    assert (3, 1) in told


def test_one_message_per_step() -> None:
    rig = Rig()
    for handle in range(1, 20):
        rig.add(handle, [handle], max_tokens=8)
    rig.until_idle()
    arrival, *steps = rig.steps
    assert (arrival.handles, arrival.load.num_running_reqs) == (b"", 19)
    assert len(steps) == rig.scheduler.totals.steps == 8


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_plans_run_ahead(depth: int) -> None:
    rig = Rig(depth)
    rig.add(1, [1], max_tokens=20)
    rig.turn(6)
    assert len(rig.loop._outstanding) == depth


def test_stop_token_is_named() -> None:
    rig = Rig()
    rig.add(1, [1, 2], max_tokens=9)
    rig.until_idle()
    third = rig.tokens(1)[2]
    rig.add(2, [1, 2], max_tokens=9, stop_token_ids=(third,))
    rig.until_idle()
    assert rig.finished()[2] == Finished(2, "stop", stop_id=third)
    assert rig.tokens(2) == rig.tokens(1)[: rig.tokens(1).index(third) + 1]


def test_abort_takes_effect_within_a_step() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=100)
    rig.turn(5)
    so_far = len(rig.tokens(1))
    rig.channel.incoming.append(Abort([1, 77]))
    rig.turn()
    assert rig.finished() == {1: Finished(1, "abort")}
    assert len(rig.tokens(1)) == so_far
    rig.until_idle()
    assert len(rig.tokens(1)) == so_far
    assert rig.steps[-1].load.num_running_reqs == 0
    assert rig.executor.forgotten == [1]


def test_deadlines() -> None:
    rig = Rig()
    rig.add(1, [1], timeout_s=4.5, max_tokens=100)
    rig.add(2, [1], max_tokens=10)
    rig.until_idle()
    ended = rig.finished()[1]
    assert (ended.reason, ended.status) == ("error", 408)
    assert "4.5 s" in (ended.error or "")
    assert len(rig.tokens(1)) < 6
    assert len(rig.tokens(2)) == 10


def test_deadline_of_a_paused_request_is_waited_for() -> None:
    rig = Rig()
    rig.channel.incoming.append(Call(1, "pause", {"mode": "all"}))
    rig.add(1, [1], timeout_s=30, max_tokens=5)
    rig.turn(3)
    assert rig.channel.waits[0] == pytest.approx(30)
    assert rig.finished()[1].status == 408
    assert rig.tokens(1) == []


def test_idle_loop_waits_for_ever() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=2)
    rig.until_idle()
    rig.turn()
    assert rig.channel.waits == [None]


def test_grammar_is_waited_for_without_a_seat() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=3, grammar=Grammar("regex", "a"))
    rig.add(2, [1], max_tokens=3)
    rig.until_idle()
    assert rig.tokens(1) == []
    assert len(rig.tokens(2)) == 3
    rig.executor.preparing[1].set_result(None)
    assert rig.channel.num_pokes == 1
    rig.until_idle()
    assert len(rig.tokens(1)) == 3


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [(InvalidValueError("bad schema", "response_format"), 400, "response_format"), (RuntimeError("boom"), 500, None)],
)
def test_failed_grammar_ends_its_request_alone(error: Exception, status: int, field: str | None) -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=3, grammar=Grammar("regex", "a"))
    rig.add(2, [1], max_tokens=3)
    rig.turn()
    rig.executor.preparing[1].set_exception(error)
    rig.until_idle()
    ended = rig.finished()[1]
    assert (ended.reason, ended.status, ended.field) == ("error", status, field)
    assert str(error) in (ended.error or "")
    assert len(rig.tokens(2)) == 3


def test_abort_while_preparing() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=3, grammar=Grammar("regex", "a"))
    rig.turn()
    rig.channel.incoming.append(Abort([1]))
    rig.turn()
    assert rig.executor.preparing[1].cancelled()
    assert rig.finished()[1].reason == "abort"
    rig.turn(3)
    assert [len(step.finished) for step in rig.steps] == [0, 1]


def test_row_that_cannot_go_on_ends_with_its_reason() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=9)
    rig.add(2, [2], max_tokens=9)
    rig.turn(4)
    so_far = len(rig.tokens(1))
    rig.executor.fails = {1: "no token satisfies the grammar"}
    rig.turn(2)
    rig.executor.fails = {}
    rig.until_idle()
    ended = rig.finished()[1]
    assert (ended.reason, ended.error) == ("error", "no token satisfies the grammar")
    assert len(rig.tokens(1)) <= so_far + 1
    assert len(rig.tokens(2)) == 9


def test_refusals_of_the_scheduler() -> None:
    rig = Rig(max_waiting_reqs=2, max_running=1)
    for handle in range(1, 5):
        rig.add(handle, [handle], max_tokens=3)
    rig.add(9, list(range(40)) * 5, max_tokens=3)
    rig.until_idle()
    ended = rig.finished()
    assert {handle: each.reason for handle, each in ended.items()} == {
        1: "length",
        2: "length",
        3: "error",
        4: "error",
        9: "error",
    }
    assert (ended[3].status, ended[9].status, ended[9].field) == (429, 400, "prompt")


def test_calls() -> None:
    rig = Rig()
    rig.add(1, list(range(16)), max_tokens=2)
    rig.until_idle()
    for call in (
        Call(1, "ping"),
        Call(2, "loads"),
        Call(3, "flush_cache"),
        Call(4, "pause", {"mode": "new"}),
        Call(5, "pause", {"mode": "later"}),
    ):
        rig.channel.incoming.append(call)
    rig.add(2, [1], max_tokens=2)
    rig.turn(3)
    replies = rig.replies()
    assert replies[1] == Reply(1)
    assert isinstance(replies[2].value, RankLoad)
    assert replies[3].value == 4
    assert replies[4] == Reply(4)
    assert "later" in (replies[5].error or "")
    assert rig.tokens(2) == []
    assert rig.steps[-1].load.paused == "new"
    assert rig.steps[-1].load.num_waiting_reqs == 1
    rig.channel.incoming.append(Call(6, "resume"))
    rig.until_idle()
    assert len(rig.tokens(2)) == 2
    assert rig.steps[-1].load.paused == ""


def test_load_counts() -> None:
    rig = Rig(max_running=2)
    for handle in range(1, 4):
        rig.add(handle, [handle] * 5, max_tokens=4)
    rig.turn(2)
    load = rig.steps[-1].load
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_waiting_tokens) == (2, 1, 5)
    assert load.num_tokens == load.num_used_tokens + load.num_waiting_tokens
    assert load.num_waiting_uncached_tokens == 5
    assert 0 < load.num_expected_output_tokens <= 8
    rig.until_idle()
    load = rig.steps[-1].load
    assert (load.num_running_reqs, load.num_waiting_reqs, load.total_finished) == (0, 0, 3)
    assert (load.num_inflight_rows, load.num_expected_output_tokens, load.num_prefilling_tokens) == (0, 0, 0)
    assert load.total_output_tokens == 12
    assert load.step_ms == pytest.approx(STEP_S * 1e3)


def test_cached_tokens_come_with_the_first_token() -> None:
    rig = Rig()
    for handle in (1, 2):
        rig.add(handle, list(range(13)), max_tokens=3)
        rig.until_idle()
    with_cached = [step for step in rig.steps if step.cached]
    assert [step.cached for step in with_cached] == [{2: 12}]
    assert np.frombuffer(with_cached[0].handles, np.int64).tolist() == [2]
    assert rig.finished()[2].num_cached == 12


def test_logprobs_travel_with_their_tokens() -> None:
    rig = Rig()
    rig.add(1, [1, 2, 3], max_tokens=3)
    rig.add(2, [1, 2, 3], max_tokens=3, logprobs=2, prompt_logprobs=0)
    rig.until_idle()
    for step in rig.steps:
        handles, tokens = np.frombuffer(step.handles, np.int64), np.frombuffer(step.tokens, np.int32)
        rows = [row.index for row in step.logprobs]
        assert handles[rows].tolist() == [2] * len(rows)
        assert [row.logprobs.token_id for row in step.logprobs] == tokens[rows].tolist()
    assert [len(step.logprobs) for step in rig.steps if step.tokens] == [1, 1, 1]
    (part,) = [part for step in rig.steps for part in step.prompt_logprobs]
    assert (part.handle, [each.token_id for each in part.logprobs]) == (2, [2, 3])


def test_stop_lands_what_is_outstanding() -> None:
    rig = Rig()
    rig.add(1, [1], max_tokens=100)
    rig.turn(3)
    rig.channel.incoming.append(Stop())
    rig.loop.run()
    assert not rig.loop._outstanding


class BrokenStep:
    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        raise RuntimeError("the device is gone")


class BrokenExecutor(SimExecutor):
    def submit(self, plan: StepPlan) -> BrokenStep:  # type: ignore[override]
        return BrokenStep()


def test_failed_step_ends_the_loop() -> None:
    rig = Rig()
    broken = BrokenExecutor(rig.executor.info, LinearCost(1.0), rig.clock)
    loop = EngineLoop(rig.scheduler, broken, rig.channel, rig.clock)
    rig.add(1, [1])
    with pytest.raises(RuntimeError, match="the device is gone"):
        loop.run()
