"""Random workloads for a scheduler: settings, scripts of events, a fake executor, and a driver that checks invariants.

The executor models KV memory cell by cell: a step writes every row's tokens through the page table as it was
when the plan was submitted, then each sampled row reads [0, position) back through the same table and draws a
token from a hash of what it read. A page shared wrongly, freed too early or written at a wrong position
therefore shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.errors import InvalidValueError, QueueFullError
from equipoise.exec.protocol import ExecutorInfo, StepOutput
from equipoise.request import EncoderItem, Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.encoder import EncoderCache
from equipoise.sched.extend import Extension
from equipoise.sched.resources import LoraSlots
from equipoise.sched.rules import RankState

VOCAB_SIZE = 61
"""Small, so that stop tokens are drawn now and then."""

MAX_MODEL_LEN = 40
AGEING_S = 0.5
GARBAGE = -2
WAITING = ("waiting", "blocked", "returning")
SEATED = ("prefilling", "decoding", "drafting", "verifying", "draining")
MAX_EXTRA_OUTSTANDING = 1
"""Plans beyond the depth that a script may ask for."""


# ---------------------------------------------------------------- what is drawn


def cells_of(tokens, salt="", items=(), start=0):
    """What KV cells hold for `tokens` at positions [start, ...): values that differ by token, position, salt and the
    encoder item that fills the position."""
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    cells = (np.asarray(tokens, np.int64) + 1) * 1_000_003 + positions * 7919 + zlib.crc32(salt.encode())
    for item in items:
        cells[(positions >= item.start) & (positions < item.start + item.n)] += zlib.crc32(item.key.encode()) << 20
    return cells


def cells_for(request, tokens, start=0):
    """The same for tokens of `request`."""
    return cells_of(tokens, salt_of(request), request.encoder_items, start)


def salt_of(request):
    """What keys a request's KV beside its tokens: requests that differ in it must never share a page."""
    return f"{request.cache_salt}/{request.lora}"


def draw(cells):
    """The token that follows a history: a pure function of its cells."""
    return zlib.crc32(cells.tobytes()) % VOCAB_SIZE


def oracle(request, prompt):
    """Tokens and finish reason of `request` when it runs alone, computed without any scheduler."""
    tokens = list(prompt)
    while len(tokens) < request.stop_len:
        tokens.append(draw(cells_for(request, tokens)))
        if tokens[-1] in request.stop_ids:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class MemoryExecutor:
    """Runs plans in order, at once; a caller delivers the outputs as late as it likes."""

    def __init__(self, columns, num_pages, encoder=None):
        self._columns = columns
        self._encoder = encoder
        self._memory = np.full((num_pages, columns.page_size), -1, np.int64)
        self._last_token = np.zeros(columns.num_seats, np.int64)
        self._requests = {}

    def forget(self):
        """All KV is lost, as when the weights have changed."""
        self._memory[:] = GARBAGE

    def fill(self, request, first, upto, *, is_right):
        """A remote store writes tokens [first, upto) of `request`, or garbage, into its pages."""
        cells = cells_for(request, request.prompt_ids[first:upto], first)
        self._write(np.array(request.pages), first, cells if is_right else np.full_like(cells, GARBAGE))

    def submit(self, plan):
        """Run `plan`: all KV is written before any row reads. Returns its StepOutput."""
        for request in plan.seated:
            self._requests[request.handle] = request
        if self._encoder is not None:
            self._encoder.run(plan)
        columns = self._columns
        table = columns.page_table.copy()
        decodes = list(zip(plan.decode_seats.tolist(), plan.decode_starts.tolist(), strict=True))
        for row, (seat, start) in enumerate(decodes):
            request = self._requests[int(plan.sampled_handles[row])]
            self._write(table[seat], start, cells_for(request, [self._last_token[seat]], start))
        for row in plan.prefills:
            tokens = columns.tokens[row.seat, row.start : row.start + row.n]
            self._write(table[row.seat], row.start, cells_for(row.request, tokens, row.start))
        tokens = [
            draw(self._read(table[seat], at))
            for seat, at in zip(plan.sampled_seats.tolist(), plan.sampled_at.tolist(), strict=True)
        ]
        self._last_token[plan.sampled_seats] = tokens
        return StepOutput(np.array(tokens, np.int32))

    def _write(self, pages, start, cells):
        positions = np.arange(start, start + len(cells))
        size = self._columns.page_size
        self._memory[pages[positions // size], positions % size] = cells

    def _read(self, pages, upto):
        positions = np.arange(upto)
        size = self._columns.page_size
        return self._memory[pages[positions // size], positions % size]


class Encoder:
    """Encodes what chunks reach and it does not keep; drops what the scheduler's cache drops."""

    def __init__(self, max_step_tokens, num_cache_tokens, *, whole_prompts):
        self.cache = EncoderCache(max_step_tokens, num_cache_tokens, whole_prompts=whole_prompts)
        self._max_step_tokens = max_step_tokens
        self._num_cache_tokens = num_cache_tokens
        self._sizes = {}

    def run(self, plan):
        """Make what `plan` needs, within the budget and the room."""
        self._drop()
        fresh = {}
        for row in plan.prefills:
            for item in row.request.encoder_items:
                if item.start < row.start + row.n and item.start + item.n > row.start:
                    assert self.cache.is_cached(item.key)
                    fresh.setdefault(item.key, item.n)
        fresh = {key: n for key, n in fresh.items() if key not in self._sizes}
        assert sum(fresh.values()) <= self._max_step_tokens
        self._sizes |= fresh
        assert sum(self._sizes.values()) <= self._num_cache_tokens

    def _drop(self):
        self._sizes = {key: n for key, n in self._sizes.items() if self.cache.is_cached(key)}


class RemoteStore:
    """Holds the first tokens of some prompts, and brings them some steps later: all, a part, or nothing."""

    def __init__(self, driver):
        self._driver = driver
        self.pending = {}

    def num_tokens(self, request):
        return self._driver.fates[request.handle].spec.remote

    def start(self, request, first, upto):
        assert request.place == "loading"
        assert request.handle not in self.pending
        assert 0 <= first < upto == len(request.pages) * self._driver.settings.page_size < request.num_known
        self._driver.executor.fill(request, first, upto, is_right=False)
        self.pending[request.handle] = [1 + request.handle % 4, request, first, upto]

    def tick(self):
        """A step has passed."""
        for entry in tuple(self.pending.values()):
            entry[0] -= 1
            if entry[0] <= 0:
                self._arrive(*entry[1:])

    def _arrive(self, request, first, upto):
        del self.pending[request.handle]
        came = {0: 0, 1: first + (upto - first) // 2}.get(request.handle % 5, upto)
        # The store of a request that ended writes too: nobody else may have the pages yet.
        is_right = self._driver.fates[request.handle].ended is None
        self._driver.executor.fill(request, first, max(first, came), is_right=is_right)
        self._driver.scheduler.kv_arrived(request.handle, came)


# ---------------------------------------------------------------- settings and scripts


@dataclass(frozen=True)
class Settings:
    """One combination of features. `num_slots` bounds a test resource held by the requests that `needs_slot`."""

    depth: int = 0
    chunked: bool = True
    long_prefill_cap: int = 0
    page_aligned: bool = False
    prefix_cache: bool = False
    order: str = "fcfs"
    reserve_full: bool = True
    watermark: float = 0.0
    max_running: int = 4
    max_step_tokens: int = 64
    num_pages: int = 64
    page_size: int = 4
    prefill_interval: int = 1
    admission_cap: int | None = None
    min_free_seats: int = 1
    balance_margin: int | None = None
    adaptive_prefill_cap: bool = False
    num_slots: int | None = None
    max_loras: int | None = None
    preempt: str = "last"
    max_bypass: int = 0
    num_drafts: int = 0
    max_waiting_reqs: int = 4096
    max_waiting_tokens: int | None = None
    has_remote: bool = False
    encoder: tuple[int, int] | None = None
    aligns_ranks: bool = False
    rents: bool = False

    @property
    def max_model_len(self):
        return min(MAX_MODEL_LEN, self.num_pages * self.page_size + 1)

    @property
    def budget_unit(self):
        """Tokens in whose multiples chunks are charged."""
        is_aligned = self.page_aligned and self.chunked and self.max_step_tokens >= self.page_size
        return self.page_size if is_aligned else 1

    def build(self, clock, extension=None):
        """The scheduler, through the one function that users have."""
        info = ExecutorInfo("test", VOCAB_SIZE, MAX_MODEL_LEN, self.page_size, self.num_pages, (), "none", "none")
        config = SchedulerConfig(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            chunked_prefill=self.chunked,
            long_prefill_cap=self.long_prefill_cap,
            page_aligned_prefill=self.page_aligned,
            prefill_interval=self.prefill_interval,
            admission_cap=self.admission_cap,
            min_free_seats=self.min_free_seats,
            balance=self.balance_margin is not None,
            balance_margin=self.balance_margin,
            prefill_alignment=self.aligns_ranks,
            prefill_alignment_passes=3 if self.aligns_ranks else None,
            rent_or_buy=self.rents,
            rent_or_buy_max_delay_s=0.3 if self.rents else None,
            adaptive_prefill_cap=self.adaptive_prefill_cap,
            order=self.order,
            ageing_s=AGEING_S,
            depth=self.depth,
            reserve_full_prompt=self.reserve_full,
            watermark=self.watermark,
            preempt=self.preempt,
            max_bypass=self.max_bypass,
            max_waiting_reqs=self.max_waiting_reqs,
            max_waiting_tokens=self.max_waiting_tokens,
        )
        cache = CacheConfig(page_size=self.page_size, prefix_cache=self.prefix_cache)
        slots = Extension(resources=[LoraSlots(self.max_loras)] if self.max_loras else [])
        return build_scheduler(config, cache, info, clock, slots.and_then(extension or Extension()))


@dataclass(frozen=True)
class Spec:
    """A request to be. Its prompt is `shared` tokens that depend on `family` alone, then `own` tokens of its own."""

    family: int = 0
    shared: int = 0
    own: int = 1
    salt: str = ""
    lora: str | None = None
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    timeout_s: float | None = None
    wants_prompt_logprobs: bool = False
    needs_slot: bool = False
    parks: bool = False
    remote: int = 0
    items: tuple[tuple[int, int, str], ...] = ()
    num_late: int = 0

    def prompt(self, index):
        """Tokens of the `index`-th request of a script."""
        shared = (np.arange(self.shared) * (7 + 2 * self.family) + self.family) % VOCAB_SIZE
        own = (np.arange(self.own) * 11 + 13 * index + 5) % VOCAB_SIZE
        return np.concatenate([shared, own]).astype(np.int32)


@dataclass(frozen=True)
class Op:
    """One event: add, step, plan, collect, abort, wake, pause, resume, flush, advance."""

    name: str
    spec: Spec | None = None
    which: int = 0
    mode: str = "new"

    def __repr__(self):
        detail = {
            "add": self.spec,
            "abort": self.which,
            "wake": self.which,
            "pause": self.mode,
            "flush": self.mode,
        }.get(self.name, "")
        return f"{self.name}({detail})"


SELDOM = st.integers(0, 9).map(lambda n: n == 9)


@st.composite
def settings_of(draw_from):
    """Any combination of features; pages and seats are scarce more often than not."""
    page_size = draw_from(st.sampled_from([1, 2, 4, 8]))
    chunked = draw_from(st.booleans())
    max_running = draw_from(st.integers(1, 2) | st.integers(3, 7))
    setting = Settings(
        depth=draw_from(st.integers(0, 2)),
        chunked=chunked,
        long_prefill_cap=draw_from(st.sampled_from([0, 0, 1, 3, 8])),
        page_aligned=draw_from(st.booleans()),
        prefix_cache=draw_from(st.sampled_from([True, True, False])),
        order=draw_from(st.sampled_from(["fcfs", "fcfs", "priority", "priority", "shortest-first", "longest-first"])),
        preempt=draw_from(st.sampled_from(["last", "cheapest"])),
        max_bypass=draw_from(st.sampled_from([0, 0, 1, 3])),
        num_drafts=draw_from(st.sampled_from([0, 0, 0, 1, 3])),
        max_loras=draw_from(st.sampled_from([None, None, 1, 2])),
        reserve_full=draw_from(st.booleans()),
        watermark=draw_from(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5])),
        max_running=max_running,
        num_pages=draw_from(st.integers(-(-8 // page_size), 48 // page_size)),
        page_size=page_size,
        prefill_interval=draw_from(st.sampled_from([1, 1, 1, 2, 5])),
        admission_cap=draw_from(st.sampled_from([None, None, None, None, 1, 3])),
        min_free_seats=draw_from(st.integers(1, max_running)) if draw_from(SELDOM) else 1,
        balance_margin=draw_from(st.integers(0, max_running - 1)) if draw_from(SELDOM) else None,
        adaptive_prefill_cap=draw_from(st.booleans()),
        num_slots=draw_from(st.sampled_from([None, None, None, 1, 2])),
        has_remote=draw_from(st.sampled_from([False, False, False, True])),
        encoder=draw_from(st.sampled_from([None, None, None, (3, 3), (3, 5), (6, 6)])),
        aligns_ranks=draw_from(SELDOM),
        rents=draw_from(SELDOM),
        max_waiting_reqs=3 if draw_from(SELDOM) else 4096,
        max_waiting_tokens=20 if draw_from(SELDOM) else None,
    )
    least = 1 if chunked else setting.max_model_len
    return replace(setting, max_step_tokens=least + draw_from(st.integers(0, 8) | st.integers(8, 40)))


@st.composite
def specs(draw_from, max_model_len):
    """A request that a rank with `max_model_len` takes."""
    # Most prompts are short, so that several requests run at once and outgrow the pages together.
    most = max_model_len - 1 if draw_from(SELDOM) else min(12, max_model_len - 1)
    shared = draw_from(st.integers(0, most))
    own = draw_from(st.integers(1 if shared == 0 else 0, most - shared))
    stop_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20, unique=True).map(tuple)
    first, second, gap = draw_from(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8)))
    return Spec(
        family=int(draw_from(SELDOM)),
        shared=shared,
        own=own,
        salt="tenant" if draw_from(SELDOM) else "",
        lora=draw_from(st.sampled_from([None, None, None, None, None, "x", "y"])),
        max_tokens=draw_from(st.integers(1, 6) | st.integers(6, 30)),
        stop_ids=draw_from(stop_ids) if draw_from(st.booleans()) else (),
        priority=draw_from(st.integers(0, 2)),
        timeout_s=float(draw_from(st.integers(0, 20))) if draw_from(SELDOM) else None,
        wants_prompt_logprobs=draw_from(SELDOM),
        needs_slot=draw_from(st.booleans()),
        parks=draw_from(SELDOM),
        remote=draw_from(st.integers(0, MAX_MODEL_LEN)) if draw_from(st.booleans()) else 0,
        items=items_of(shared + own, (first, second), gap),
        num_late=draw_from(st.integers(1, 9)) if draw_from(SELDOM) else 0,
    )


def items_of(num_prompt, sizes, gap):
    """Encoder items of these `sizes`, `gap` positions apart, as many as the prompt holds."""
    items, start = [], gap
    for n in sizes:
        if n and start + n <= num_prompt:
            items.append((start, n, f"{'xy'[start % 2]}{n}"))
            start += n + gap // 2
    return tuple(items)


WEIGHTS = {"add": 24, "step": 30, "plan": 4, "collect": 3, "abort": 3, "wake": 2, "pause": 1, "resume": 3, "flush": 1}
NAMES = st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)])


@st.composite
def ops(draw_from, max_model_len):
    """One event of a script, steps and new requests most of all."""
    name = draw_from(NAMES)
    if name == "add":
        return Op(name, spec=draw_from(specs(max_model_len)))
    if name in ("abort", "wake"):
        return Op(name, which=draw_from(st.integers(0, 100)))
    if name == "pause":
        return Op(name, mode=draw_from(st.sampled_from(["new", "all"])))
    if name == "flush":
        return Op(name, mode=draw_from(st.sampled_from(["cached", "running"])))
    return Op(name)


@st.composite
def workloads(draw_from, max_ops=60):
    """(Settings, script)."""
    setting = draw_from(settings_of())
    # Left alone, lists stay short: most workloads must be long enough to fill the pages.
    min_ops = draw_from(st.integers(0, max_ops))
    return setting, draw_from(st.lists(ops(setting.max_model_len), min_size=min_ops, max_size=max_ops))


# ---------------------------------------------------------------- the driver


class Slots:
    """A resource: at most `num_slots` admitted requests among those whose handle is in `needing`."""

    name = "slots"

    def __init__(self, num_slots, needing):
        self.num_slots = num_slots
        self.needing = needing
        self.held = set()

    def check(self, request):
        assert request.place == "new"

    def begin_step(self):
        assert len(self.held) <= self.num_slots
        return True

    def share(self, request):
        return "needing" if request.handle in self.needing else ""

    def fit(self, request, n):
        assert n > 0
        return request.handle not in self.needing or len(self.held) < self.num_slots

    def take(self, request, n):
        assert n > 0
        if request.handle in self.needing:
            self.held.add(request.handle)

    def give_back(self, request):
        if request.handle in self.needing:
            self.held.remove(request.handle)


class HalfRightDrafter:
    """Proposes what will be drawn, but for a wrong token now and then, after which it goes on as if it were right."""

    def __init__(self, num_drafts):
        self.num_drafts = num_drafts

    def drafts_for(self, request):
        return request.handle % 4 != 3

    def propose(self, request, tokens, most):
        tokens = tokens.tolist()
        first = len(tokens)
        for _ in range(min(most, self.num_drafts)):
            is_wrong = len(tokens) % 5 == request.handle % 5
            tokens.append((draw(cells_for(request, tokens)) + is_wrong) % VOCAB_SIZE)
        return tokens[first:]


@dataclass
class Fate:
    """What the driver saw of one request."""

    request: Request
    spec: Spec
    prompt: list[int]
    delivered: list[int] = field(default_factory=list)
    ended: str | None = None
    num_scheduled: int = 0
    is_parked: bool = False
    late: list[list[int]] = field(default_factory=list)


class Driver:
    """Runs a script against a scheduler, checking every invariant after every event."""

    def __init__(self, settings):
        self.settings = settings
        self.clock = VirtualClock()
        self.needing = set()
        self.slots = [] if settings.num_slots is None else [Slots(settings.num_slots, self.needing)]
        drafter = HalfRightDrafter(settings.num_drafts) if settings.num_drafts else None
        self.encoder = Encoder(*settings.encoder, whole_prompts=not settings.chunked) if settings.encoder else None
        caches = [self.encoder.cache] if self.encoder else []
        self.store = RemoteStore(self)
        extension = Extension(
            resources=[*self.slots, *caches],
            limits=[cache.limit_rule for cache in caches],
            drafter=drafter,
            remote=self.store if settings.has_remote else None,
        )
        self.scheduler = settings.build(self.clock, extension)
        self.executor = MemoryExecutor(self.scheduler.columns, settings.num_pages, self.encoder)
        self.outstanding = deque()
        self.fates = {}
        self.num_plans = 0
        self._num_added = 0

    def run(self, script):
        """Every event of `script`, then whatever is left until all requests have ended."""
        for op in script:
            self.execute(op)
            self.check()
        self.finish()

    def execute(self, op):
        """One event."""
        getattr(self, f"op_{op.name}")(op)

    def finish(self):
        """Wake and resume all, step until nothing is left, and check that nothing stays behind."""
        self.op_resume(None)
        for handle in self.fates:
            self._wake(handle)
        bound = 100 + 40 * sum(fate.request.stop_len for fate in self.fates.values())
        while self.scheduler.num_requests or self.outstanding or self.store.pending:
            self.op_step(None)
            self.check()
            bound -= 1
            assert bound > 0, f"livelock: {list(self.scheduler.requests())}"
        self.check_end()

    # ------------------------------------------------------------ events

    def op_add(self, op):
        spec, handle = op.spec, self._num_added
        self._num_added += 1
        whole = spec.prompt(handle)
        prompt = whole[: max(1, len(whole) - spec.num_late)]
        late = [piece.tolist() for piece in np.array_split(whole[len(prompt) :], 2) if len(piece)]
        params = SamplingParams(
            max_tokens=spec.max_tokens,
            stop_token_ids=spec.stop_ids,
            prompt_logprobs=0 if spec.wants_prompt_logprobs else None,
        )
        now = self.clock.now()
        request = Request(
            handle,
            f"r{handle}",
            prompt,
            params,
            max_model_len=self.scheduler.max_model_len,
            arrival_s=now,
            priority=spec.priority,
            cache_salt=spec.salt,
            lora=spec.lora,
            encoder_items=tuple(EncoderItem(*item) for item in spec.items) if self.encoder else (),
            deadline_s=None if spec.timeout_s is None else now + spec.timeout_s,
        )
        if spec.needs_slot:
            self.needing.add(handle)
        must_fit = not self._waiting()
        parks = spec.parks or bool(late)
        try:
            self.scheduler.add(request, wait_for="input" if late else "event" if spec.parks else None)
        except InvalidValueError:
            assert sum(item.n for item in request.encoder_items) > min(self.settings.encoder)
            assert not self.settings.chunked
            return
        except QueueFullError:
            assert not must_fit
            assert len(self._waiting()) >= self.settings.max_waiting_reqs or self.settings.max_waiting_tokens
            return
        self.fates[handle] = Fate(request, spec, prompt.tolist(), is_parked=parks, late=late)

    def op_step(self, _op):
        """What the engine loop does in a turn: expire, launch a plan, land the oldest."""
        self.op_advance(_op)
        self.store.tick()
        launched = self._plan()
        if self.outstanding and (not launched or len(self.outstanding) > self.settings.depth):
            self.op_collect(_op)

    def op_plan(self, _op):
        if len(self.outstanding) <= self.settings.depth + MAX_EXTRA_OUTSTANDING:
            self._plan()

    def op_collect(self, _op):
        if self.outstanding:
            plan, output = self.outstanding.popleft()
            self._deliver(plan, output, self.scheduler.apply(plan, output))

    def op_abort(self, op):
        handle = self._pick(op.which)
        if handle is None:
            return
        was_alive = self.fates[handle].ended is None
        ended = self.scheduler.abort(handle)
        assert (ended is not None) == was_alive
        if ended is not None:
            self._ended(ended, "abort")

    def op_wake(self, op):
        handle = self._pick(op.which)
        if handle is not None:
            self._wake(handle)

    def op_pause(self, op):
        self.scheduler.pause(op.mode)

    def op_resume(self, _op):
        self.scheduler.resume()

    def op_flush(self, op):
        self.scheduler.flush_cache(preempt_running=op.mode == "running")
        if op.mode == "running":
            self.executor.forget()
        assert self.scheduler.kv.num_cached == 0

    def op_advance(self, _op):
        self.clock.advance(1.0)
        for request in self.scheduler.expire():
            assert request.deadline_s <= self.clock.now()
            self._ended(request, "abort")

    def _wake(self, handle):
        fate = self.fates[handle]
        for piece in fate.late:
            self.scheduler.extend_prompt(handle, np.array(piece, np.int32))
            fate.prompt += piece if fate.ended is None else []
        self.scheduler.wake(handle)
        fate.late, fate.is_parked = [], False

    def _pick(self, which):
        handles = list(self.fates)
        return handles[which % len(handles)] if handles else None

    # ------------------------------------------------------------ planning and landing

    def _ranks(self):
        """This rank and another of its group: one that never wants to prefill, or one that always runs and pays."""
        if self.settings.rents:
            prefilled = 7 if self.num_plans % 3 == 0 else 0
            num_running = max(0, min(2, self.settings.max_running - (self.settings.balance_margin or 0) - 1))
            busy = RankState(
                num_running, 1, True, 0, 1, 9, 9, 0, 9, step_s=0.05 + 0.01 * prefilled, step_prefill_tokens=prefilled
            )
            return (self.scheduler.state(), busy)
        return (self.scheduler.state(), RankState(0, 0)) if self.settings.aligns_ranks else None

    def _plan(self):
        """Launch a plan; False when there is nothing to run."""
        scheduler = self.scheduler
        if not scheduler.has_work:
            return False
        plan = scheduler.schedule(self._ranks())
        if plan.is_empty:
            # With fewer tokens a step than seats, all rows planned may be preempted: others go on in the next step.
            may_be_empty = bool(plan.preempted) and self.settings.max_running > self.settings.max_step_tokens
            # Somebody that waits with loaded pages gave them up for the head, which has its turn in the next step.
            may_be_empty |= bool(plan.preempted) and self.settings.has_remote
            may_be_empty |= bool(self.store.pending) or self.settings.aligns_ranks or self.settings.rents
            assert self.outstanding or may_be_empty, f"stuck: {list(scheduler.requests())}"
            return False
        self.num_plans += 1
        self.check_plan(plan)
        self.outstanding.append((plan, self.executor.submit(plan)))
        return True

    def _deliver(self, plan, output, result):
        assert len(result.rows) == len(result.handles) == len(result.tokens)
        assert result.handles.tolist() == plan.sampled_handles[result.rows].tolist()
        assert result.tokens.tolist() == output.tokens[result.rows].tolist()
        assert self.settings.num_drafts or len(set(result.handles.tolist())) == len(result.handles)
        for handle, token in zip(result.handles.tolist(), result.tokens.tolist(), strict=True):
            fate = self.fates[handle]
            assert fate.ended is None, f"a token for {fate.request}, which has ended"
            fate.delivered.append(token)
        for request in result.finished:
            self._ended(request, request.finish_reason)

    def _ended(self, request, reason):
        fate = self.fates[request.handle]
        assert fate.ended is None, f"{request} ended twice"
        assert request.finish_reason == reason
        assert request.place == "ended"
        assert request.seat is None
        assert request.pages == [] or request.handle in self.store.pending
        fate.ended = reason

    # ------------------------------------------------------------ invariants

    def check_plan(self, plan):
        """A plan that was just made: its budget, its seats, its rows, and whom it admitted."""
        settings, columns = self.settings, self.scheduler.columns
        unit = settings.budget_unit
        # Rows to verify are decodes with drafts: charged by tokens, as decodes are.
        chunks = [row for row in plan.prefills if row not in plan.verifies]
        charged = len(plan.decode_seats) + sum(row.n for row in plan.verifies)
        charged += sum(-(-row.n // unit) * unit for row in chunks)
        assert charged <= settings.max_step_tokens
        assert plan.num_tokens == len(plan.decode_seats) + plan.num_prefill_tokens
        assert plan.num_prefill_tokens == sum(row.n for row in plan.prefills)
        seats = plan.decode_seats.tolist() + [row.seat for row in plan.prefills]
        assert len(set(seats)) == len(seats)
        sampled = [row.seat for row in plan.prefills for _ in range(row.num_samples)]
        assert plan.sampled_seats.tolist() == plan.decode_seats.tolist() + sampled
        assert columns.handle[plan.sampled_seats].tolist() == plan.sampled_handles.tolist()
        for handle in plan.sampled_handles.tolist():
            self.fates[handle].num_scheduled += 1
        for row in plan.prefills:
            self._check_chunk(row)
        if settings.order != "priority" and not settings.has_remote:
            assert not (plan.preempted and plan.seated)
        assert all(request in [row.request for row in plan.prefills] for request in plan.seated)
        self._check_order(plan)

    def _check_chunk(self, row):
        request, settings = row.request, self.settings
        end, known = row.start + row.n, self._num_known(request)
        assert row.n > 0
        assert row.samples == (end == known + len(row.drafts))
        assert end <= known + settings.num_drafts
        if settings.budget_unit > 1:
            item_starts = [item.start for item in request.encoder_items]
            is_apart = row.request.place == "verifying" or settings.has_remote or row.start in item_starts
            assert row.samples or end % settings.page_size == 0 or end in item_starts
            assert row.start % settings.page_size == 0 or is_apart
        if not settings.chunked:
            assert row.samples
        if request.params.prompt_logprobs is not None or not (settings.prefix_cache or settings.has_remote):
            assert request.num_cached == 0

    def _check_order(self, plan):
        """Nobody was admitted past an earlier request that waits and could have been: those came back or never ran."""
        if not plan.seated or self.settings.max_bypass:
            return
        last = max(self._order(request) for request in plan.seated)
        waiting = [self._order(request) for request in self.scheduler.requests() if request.place == "waiting"]
        assert all(order > last for order in waiting), f"{plan.seated} passed one that waits"

    def _order(self, request):
        key = (request.arrival_s, request.handle)
        return {
            "fcfs": key,
            "priority": (request.priority, *key),
            "shortest-first": (request.num_prompt + request.arrival_s / AGEING_S, request.handle),
            "longest-first": (-request.num_prompt, *key),
        }[self.settings.order]

    def check(self):
        """What must hold between any two events."""
        self.scheduler.check()
        self._check_pages()
        self._check_places()
        self._check_ledger()
        self._check_columns()

    def _check_pages(self):
        kv, size = self.scheduler.kv, self.settings.page_size
        owned = set()
        for request in self.scheduler.requests():
            assert len(set(request.pages)) == len(request.pages)
            is_loading = request.handle in self.store.pending
            assert is_loading == (request.place == "loading")
            assert request.pages == [] or request.seat is not None or is_loading or request.num_loaded
            owned.update(request.pages)
            if not self.settings.prefix_cache:
                assert len(request.pages) <= -(-request.stop_len // size)
        for _, request, _, _ in self.store.pending.values():
            owned.update(request.pages)
        assert kv.num_free + len(owned) == kv.num_pages
        assert self.scheduler.load().num_used_tokens == len(owned) * size

    def _check_places(self):
        alive = {handle for handle, fate in self.fates.items() if fate.ended is None}
        assert {request.handle for request in self.scheduler.requests()} == alive
        by_place = {}
        for request in self.scheduler.requests():
            by_place.setdefault(request.place, []).append(request)
            assert (request.seat is not None) == (request.place in SEATED)
        parked = {request.handle for request in by_place.get("parked", ())}
        assert parked == {handle for handle in alive if self.fates[handle].is_parked}
        seats = [request.seat for request in self.scheduler.requests() if request.seat is not None]
        assert len(set(seats)) == len(seats) <= self.settings.max_running
        assert self.scheduler.load().num_running == len(seats)
        for request in by_place.get("returning", ()):
            assert request.num_inflight == self._num_in_flight(request) > 0
        for request in by_place.get("draining", ()):
            assert self._num_in_flight(request) > 0
            assert self._num_known(request) + self._num_in_flight(request) == request.stop_len
        loras = {r.lora for r in self.scheduler.requests() if r.seat is not None and r.lora}
        assert self.settings.max_loras is None or len(loras) <= self.settings.max_loras
        if self.slots:
            holding = self.slots[0].held
            assert holding == {r.handle for r in self.scheduler.requests() if r.seat is not None} & self.needing

    def _check_ledger(self):
        """The load as the driver knows it. What a request waits with is what it had when it began to."""
        waiting, load, columns = self._waiting(), self.scheduler.load(), self.scheduler.columns
        seated = [request for request in self.scheduler.requests() if request.seat is not None]
        prefilling = [request for request in seated if request.place == "prefilling"]
        assert load.num_waiting == len(waiting)
        assert len(waiting) <= load.num_waiting_tokens <= sum(map(self._num_known, waiting))
        uncomputed = sum(self._num_known(request) - int(columns.computed[request.seat]) for request in prefilling)
        assert load.num_prefilling_tokens == uncomputed
        assert uncomputed <= load.num_waiting_uncached_tokens <= uncomputed + load.num_waiting_tokens
        expected = sum(request.stop_len - self._num_known(request) for request in seated)
        assert load.num_expected_output_tokens == expected
        rows = [len(plan.decode_seats) + len(plan.prefills) for plan, _ in self.outstanding]
        assert load.num_inflight_rows == sum(rows)
        assert load.num_reserved_tokens == 0 or self.settings.has_remote

    def _check_columns(self):
        columns, size = self.scheduler.columns, self.settings.page_size
        seated = {request.seat: request for request in self.scheduler.requests() if request.seat is not None}
        for seat in range(columns.num_seats):
            if seat not in seated:
                assert columns.handle[seat] == -1
                continue
            request = seated[seat]
            known = self._num_known(request)
            assert columns.handle[seat] == request.handle
            assert columns.stop_len[seat] == request.stop_len
            assert columns.known[seat] == known
            assert columns.length[seat] == known + self._num_in_flight(request)
            assert columns.tokens[seat, :known].tolist() == self._tokens(request)
            assert columns.capacity[seat] == len(request.pages) * size
            assert columns.page_table[seat, : len(request.pages)].tolist() == request.pages
            assert columns.computed[seat] <= columns.capacity[seat]
            computed, length = int(columns.computed[seat]), int(columns.length[seat])
            assert computed < known if request.place == "prefilling" else computed == length - 1

    def check_end(self):
        """Everything ended: as the oracle says, and with nothing left behind."""
        scheduler = self.scheduler
        assert all(fate.ended is not None for fate in self.fates.values())
        assert scheduler.kv.num_free == scheduler.kv.num_pages
        load = scheduler.load()
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)
        assert (load.num_prefilling_tokens, load.num_expected_output_tokens, load.num_inflight_rows) == (0, 0, 0)
        assert (load.num_waiting_uncached_tokens, load.num_reserved_tokens) == (0, 0)
        assert not scheduler.has_work
        for fate in self.fates.values():
            self._check_tokens(fate)
        totals = scheduler.totals
        assert totals.output_tokens == sum(len(fate.delivered) for fate in self.fates.values())
        ended = Counter(fate.ended for fate in self.fates.values())
        assert (totals.finished, totals.aborted) == (ended["stop"] + ended["length"], ended["abort"])
        assert totals.steps == self.num_plans

    def _check_tokens(self, fate):
        request = fate.request
        tokens, reason = oracle(request, fate.prompt)
        if fate.ended == "abort":
            assert fate.delivered == tokens[: len(fate.delivered)]
            return
        assert (fate.delivered, fate.ended) == (tokens, reason), f"{request} drew other tokens than when alone"
        assert request.output_ids == tokens
        # A stop token is seen late by what was outstanding then; a length is certain beforehand and costs nothing.
        surplus = 0 if reason == "length" else self.settings.depth + MAX_EXTRA_OUTSTANDING
        surplus += self.settings.num_drafts * len(tokens)
        assert len(tokens) <= fate.num_scheduled <= len(tokens) + surplus

    # ------------------------------------------------------------ what the driver knows by itself

    def _waiting(self):
        return [request for request in self.scheduler.requests() if request.place in WAITING]

    def _tokens(self, request):
        fate = self.fates[request.handle]
        return fate.prompt + fate.delivered

    def _num_known(self, request):
        return len(self._tokens(request))

    def _num_in_flight(self, request):
        return sum(int(np.count_nonzero(plan.sampled_handles == request.handle)) for plan, _ in self.outstanding)


def run_workload(settings, script):
    """Run `script` to its end and return the driver, for what else a test wants to know."""
    driver = Driver(settings)
    driver.run(script)
    return driver
