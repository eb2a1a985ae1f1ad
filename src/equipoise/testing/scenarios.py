"""Run recorded scheduler scenarios against our scheduler: `python -m equipoise.testing.scenarios FILE [--json]`.

A file holds a list of cases `{name, why, cfg, ops, expected}`: a configuration, a script of requests and
steps, and what another scheduler answered, plan by plan and output by output. Each difference in
scheduled counts, preempted, finished, delivered, waiting and free pages is reported. Page numbers and the
order of running requests are implementation details and are not compared.

Exit status: 0 all cases agree (or use what we do not have, which is said), 1 some differ, 2 the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, OrderName, SchedulerConfig
from equipoise.errors import ConfigError, RequestError
from equipoise.exec.protocol import ExecutorInfo, StepOutput
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.drafts import can_draft
from equipoise.sched.extend import Extension
from equipoise.sched.plan import StepPlan
from equipoise.sched.resources import LoraSlots
from equipoise.sched.rules import OPEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.request import Tokens
    from equipoise.sched.rules import StepView
    from equipoise.sched.scheduler import Scheduler

FIRST_TOKEN = 100
FRESH_SEED = 1000
FIELDS = ("scheduled", "preempted", "finished", "delivered", "waiting", "free", "computed", "spec")
UNORDERED = ("preempted", "waiting")


class CaseConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A case's `cfg`, with the names and defaults of the format."""

    max_num_seqs: int = 16
    budget: int = 8192
    usable_blocks: int = 9999
    block_size: int = 16
    apc: bool = False
    chunked: bool = True
    long_thr: int = 0
    adaptive: bool = False
    policy: OrderName = "fcfs"
    async_sched: bool = False
    interval: int = 1
    reserve_full: bool = True
    watermark: float = 0.0
    max_model_len: int | None = None
    max_loras: int = 0
    spec: int = 0
    max_active: int | None = None
    remote: int | None = None
    dp: int = 1

    def unsupported(self) -> list[str]:
        """Features that the case asks for and our scheduler does not have."""
        off = CaseConfig()
        names = ("dp",)
        return [name for name in names if getattr(self, name) != getattr(off, name)]


class Case(msgspec.Struct):
    """One scenario; `expected` has one row per plan, output or abort."""

    name: str
    cfg: CaseConfig
    ops: list[Annotated[list[Any], msgspec.Meta(min_length=1)]]
    expected: list[dict[str, Any]]
    why: str = ""


class CaseReport(msgspec.Struct):
    """What came of a case: "agree", "differ" or "unsupported", and the differences or reasons as text."""

    name: str
    status: str
    notes: list[str] = []


class ScriptedDrafts:
    """A drafter that proposes what the script said, once."""

    def __init__(self) -> None:
        self.next: dict[str, list[int]] = {}

    def drafts_for(self, request: Request) -> bool:
        return can_draft(request)

    def propose(self, request: Request, _tokens: Tokens, most: int) -> list[int]:
        return self.next.pop(request.request_id, [])[:most]


class ScriptedStore:
    """A remote store that holds the first `num_held` tokens of every prompt, and brings them when told to."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held
        self.brings: dict[int, int] = {}

    def num_tokens(self, _request: Request) -> int:
        return self._num_held

    def start(self, request: Request, _first: int, upto: int) -> None:
        self.brings[request.handle] = upto  # the script says when


class Run:
    """One case under way: the scheduler, its outstanding plans, and the rows observed so far."""

    def __init__(self, cfg: CaseConfig) -> None:
        self.clock = VirtualClock()
        self.drafts = ScriptedDrafts()
        self._store = ScriptedStore(cfg.remote or 0)
        self._throttles = False
        extension = Extension(
            drafter=self.drafts if cfg.spec else None,
            remote=self._store if cfg.remote else None,
            prefill_gates=[self.throttle],
            resources=[LoraSlots(cfg.max_loras)] if cfg.max_loras else [],
        )
        self.scheduler = _scheduler_of(cfg, self.clock, extension)
        self.rows: list[dict[str, Any]] = []
        self._outstanding: deque[StepPlan] = deque()
        self._handles: dict[str, int] = {}
        self._next_token = FIRST_TOKEN

    def execute(self, op: list[Any]) -> None:
        """Run one operation of the script. Raises ConfigError for one that is not known."""
        name, *args = op
        operation = getattr(self, f"op_{name}", None)
        if operation is None:
            raise ConfigError(f"ops: {name!r} is not supported")
        operation(*args)

    def op_add(self, name: str, spec: dict[str, Any]) -> None:
        """A new request."""
        handle = len(self._handles)
        params = SamplingParams(
            max_tokens=spec.get("max_tokens", 16),
            stop_token_ids=tuple(spec.get("stop", ())),
            ignore_eos=spec.get("ignore_eos", False),
        )
        request = Request(
            handle,
            name,
            _prompt(spec, handle),
            params,
            max_model_len=self.scheduler.max_model_len,
            arrival_s=float(spec.get("arrival", handle)),
            priority=spec.get("priority", 0),
            lora=str(spec["lora"]) if spec.get("lora") else None,
        )
        self._handles[name] = handle
        self.scheduler.add(request)

    def throttle(self, view: StepView) -> int:
        """A gate that the script closes to prefill for one plan, if anybody can decode."""
        return 0 if self._throttles and view.num_decoding else OPEN

    def op_sched(self, options: dict[str, Any] | None = None) -> None:
        """Plan a step; it stays in flight."""
        self._throttles = bool((options or {}).get("throttle"))
        # "Pause all" means that the engine does not call the scheduler.
        plan = self.scheduler.schedule() if self.scheduler.paused != "all" else _nothing(self.scheduler)
        self._outstanding.append(plan)
        scheduled = {self._name_of_seat(plan, row): 1 for row in range(len(plan.decode_seats))}
        scheduled |= {row.request.request_id: row.n for row in plan.prefills}
        self._observe(
            "sched",
            scheduled=scheduled,
            preempted=[request.request_id for request in plan.preempted],
            computed={r.request.request_id: r.start for r in plan.prefills if r.request in plan.seated},
            spec={r.request.request_id: len(r.drafts) for r in plan.verifies if r.drafts},
        )

    def op_upd(self, options: dict[str, Any] | None = None) -> None:
        """Feed the output of the oldest step in flight."""
        plan = self._outstanding.popleft()
        forced = {self._handles[name]: tokens[0] for name, tokens in (options or {}).get("tok", {}).items()}
        delivered: dict[str, int] = {}
        finished: dict[str, str | None] = {}
        if not plan.is_empty:
            names = self._names()
            accepted = (options or {}).get("accept", {})
            result = self.scheduler.apply(plan, StepOutput(self._draw(plan, forced, accepted)))
            delivered = dict(Counter(names[handle] for handle in result.handles.tolist()))
            finished = {request.request_id: request.finish_reason for request in result.finished}
        for name in (options or {}).get("recv", ()):
            self.scheduler.kv_arrived(self._handles[name], self._store.brings[self._handles[name]])
        self._observe("upd", delivered=delivered, finished=finished)

    def op_step(self, options: dict[str, Any] | None = None) -> None:
        """Plan and feed."""
        self.op_sched(options)
        self.op_upd(options)

    def op_run(self, n: int) -> None:
        """`n` steps."""
        for _ in range(n):
            self.op_step()

    def op_pipe(self, n: int) -> None:
        """`n` plans, each fed one plan later."""
        for _ in range(n):
            self.op_sched()
            if len(self._outstanding) > 1:
                self.op_upd()

    def op_abort(self, name: str) -> None:
        """End a request."""
        self.scheduler.abort(self._handles[name])
        self._observe("abort", rid=name)

    def op_pause(self, mode: str) -> None:
        """UNPAUSED, PAUSED_NEW or PAUSED_ALL."""
        match mode:
            case "UNPAUSED":
                self.scheduler.resume()
            case "PAUSED_NEW":
                self.scheduler.pause("new")
            case "PAUSED_ALL":
                self.scheduler.pause("all")
            case _:
                raise ValueError(f"{mode!r} is not UNPAUSED, PAUSED_NEW or PAUSED_ALL")

    def op_drafts(self, drafts: dict[str, list[int]]) -> None:
        """What to propose when each decodes next; a request whose prompt is partly computed gets none."""
        partly = {request.request_id for request in self.scheduler.requests() if request.place == "prefilling"}
        self.drafts.next |= {name: tokens for name, tokens in drafts.items() if name not in partly}

    def op_reset(self, running: bool = False) -> None:
        """Forget all cached prefixes; with `running` those who run start anew."""
        self.scheduler.flush_cache(preempt_running=running)

    def _observe(self, op: str, **facts: Any) -> None:
        places = [(request.request_id, request.place) for request in self.scheduler.requests()]
        waiting = [name for name, place in places if place in ("waiting", "blocked", "returning", "parked", "loading")]
        self.rows.append({"op": op, "waiting": waiting, "free": self.scheduler.kv.num_free, **facts})

    def _draw(self, plan: StepPlan, forced: dict[int, int], accepted: dict[str, int]) -> Tokens:
        """The next numbers, but for tokens that the script forces and drafts that it accepts."""
        tokens = []
        for handle in plan.sampled_handles.tolist():
            tokens.append(forced.get(handle, self._next_token))
            self._next_token += 1
        first = plan.num_plain
        for row in plan.verifies:
            num_accepted = min(accepted.get(row.request.request_id, 0), len(row.drafts))
            tokens[first : first + num_accepted] = row.drafts[:num_accepted]
            first += row.num_samples
        return np.array(tokens, np.int32)

    def _names(self) -> dict[int, str]:
        return {handle: name for name, handle in self._handles.items()}

    def _name_of_seat(self, plan: StepPlan, row: int) -> str:
        return self._names()[int(plan.sampled_handles[row])]


def _scheduler_of(cfg: CaseConfig, clock: VirtualClock, extension: Extension) -> Scheduler:
    info = ExecutorInfo(
        model_type="scenario",
        vocab_size=1 << 30,
        max_model_len=cfg.max_model_len or cfg.usable_blocks * cfg.block_size + 1,
        page_size=cfg.block_size,
        num_pages=cfg.usable_blocks,
        eos_ids=(),
        device="none",
        dtype="none",
    )
    config = SchedulerConfig(
        max_running=cfg.max_num_seqs,
        max_step_tokens=cfg.budget,
        chunked_prefill=cfg.chunked,
        long_prefill_cap=cfg.long_thr,
        adaptive_prefill_cap=cfg.adaptive,
        prefill_interval=cfg.interval,
        admission_cap=cfg.max_active,
        order=cfg.policy,
        depth=int(cfg.async_sched),
        reserve_full_prompt=cfg.reserve_full,
        watermark=cfg.watermark,
    )
    cache = CacheConfig(page_size=cfg.block_size, prefix_cache=cfg.apc)
    return build_scheduler(config, cache, info, clock, extension)


def _nothing(scheduler: Scheduler) -> StepPlan:
    return StepPlan(scheduler.totals.steps)


def _prompt(spec: dict[str, Any], handle: int) -> Tokens:
    """Token i of a range `[seed, count]` is seed * 10000 + i; `n` alone uses a seed nobody else has."""
    ranges = spec.get("prompt") or [[FRESH_SEED + handle, spec["n"]]]
    return np.concatenate([np.arange(count, dtype=np.int32) + seed * 10000 for seed, count in ranges])


def run_case(case: Case) -> CaseReport:
    """Replay `case` and compare, row by row. Raises ConfigError for a script that makes no sense."""
    reasons = case.cfg.unsupported()
    reasons += sorted({f"op {op[0]}" for op in case.ops if not hasattr(Run, f"op_{op[0]}")})
    if reasons:
        return CaseReport(case.name, "unsupported", reasons)
    notes = list(_differences(case.expected, _replay(case)))
    return CaseReport(case.name, "differ" if notes else "agree", notes)


def _replay(case: Case) -> list[dict[str, Any]]:
    """What our scheduler does, row by row."""
    try:
        run = Run(case.cfg)
    except ConfigError as error:
        raise ConfigError(f"{case.name}: cfg: {error}") from None
    for i, op in enumerate(case.ops):
        try:
            run.execute(op)
        except (ConfigError, RequestError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Scripts are written by hand and loosely typed: what they got wrong shows where it is used.
            raise ConfigError(f"{case.name}: ops[{i}] {op}: {type(error).__name__}: {error}") from error
    return run.rows


def _differences(expected: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[str]:
    if len(expected) != len(rows):
        yield f"{len(rows)} rows, expected {len(expected)}"
    for i, (theirs, ours) in enumerate(zip(expected, rows, strict=False)):
        for field in FIELDS:
            a, b = theirs.get(field), ours.get(field)
            if a is None or b is None:
                continue
            if field in UNORDERED:
                a, b = sorted(a), sorted(b)
            if a != b:
                yield f"row {i} ({ours['op']}): {field} is {b}, expected {a}"


def load_cases(path: Path) -> list[Case]:
    """Read a scenario file. Raises ConfigError naming what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Case])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.testing.scenarios", description=__doc__)
    parser.add_argument("file", type=Path, help="scenario file (JSON)")
    parser.add_argument("--json", action="store_true", help="one JSON report on stdout")
    args = parser.parse_args(argv)
    try:
        reports = [run_case(case) for case in load_cases(args.file)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(reports)).decode())
    else:
        for report in reports:
            print(f"{report.status:<12} {report.name}", *report.notes, sep="\n    ")
        counts = {status: sum(r.status == status for r in reports) for status in ("agree", "differ", "unsupported")}
        print(", ".join(f"{n} {status}" for status, n in counts.items()))
    return int(any(report.status == "differ" for report in reports))


if __name__ == "__main__":
    sys.exit(main())
