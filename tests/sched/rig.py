"""A scheduler on a bench: requests with names, plans as lists of (name, tokens), outputs fed by hand."""

from __future__ import annotations

from collections import deque

import numpy as np

from equipoise.clock import VirtualClock
from equipoise.config import CacheConfig, SchedulerConfig
from equipoise.exec.protocol import ExecutorInfo, StepOutput
from equipoise.request import Request, SamplingParams
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.roles import MIXED

PAGE_SIZE = 4
FIRST_TOKEN = 500
VOCAB_SIZE = 10_000


def make_request(handle=0, prompt=4, max_tokens=4, *, name=None, max_model_len=128, priority=0, arrival_s=None, **more):
    """`prompt`: its tokens, or how many of its own it has. `more`: of Request or of SamplingParams."""
    own = {
        key: more.pop(key) for key in ("cache_salt", "deadline_s", "encoder_items", "eos_ids", "lora") if key in more
    }
    tokens = np.arange(prompt) + 1000 * (handle + 1) if isinstance(prompt, int) else np.array(prompt)
    return Request(
        handle,
        name or f"r{handle}",
        tokens.astype(np.int32),
        SamplingParams(max_tokens=max_tokens, **more),
        max_model_len=max_model_len,
        arrival_s=float(handle) if arrival_s is None else arrival_s,
        priority=priority,
        **own,
    )


def make_info(**changes):
    """What an executor says of itself, with the rig's defaults."""
    facts = {"page_size": PAGE_SIZE, "num_pages": 64, "max_model_len": 128, "vocab_size": VOCAB_SIZE} | changes
    return ExecutorInfo("rig", eos_ids=(), device="none", dtype="none", **facts)


class Rig:
    """`extension`: rules of the test's own. `settings`: fields of SchedulerConfig, and page_size, num_pages,
    max_model_len, prefix_cache."""

    def __init__(self, extension=None, *, prefix_cache=False, role=MIXED, **settings):
        self.clock = VirtualClock()
        names = ("page_size", "num_pages", "max_model_len")
        info = make_info(**{name: settings.pop(name) for name in names if name in settings})
        config = SchedulerConfig(**{"depth": 0, "max_running": 8, "max_step_tokens": 64, **settings})
        cache = CacheConfig(page_size=info.page_size, prefix_cache=prefix_cache)
        self.scheduler = build_scheduler(config, cache, info, self.clock, extension, role)
        self.outstanding = deque()
        self.requests = {}
        self.tokens = {}
        self.ended = {}
        self.handles = 0
        self._next_token = FIRST_TOKEN

    def add(self, name, prompt=4, max_tokens=4, *, wait_for=None, **more):
        """A new request; arrivals are in the order of the calls."""
        more.setdefault("max_model_len", self.scheduler.max_model_len)
        request = make_request(self.handles, prompt, max_tokens, name=name, **more)
        self.scheduler.add(request, wait_for)
        self.handles += 1
        self.requests[name] = request
        self.tokens[name] = []
        return request

    def plan(self):
        """Plan a step and leave it outstanding: [(name, tokens)], decodes first."""
        plan = self.scheduler.schedule()
        self.last = plan
        if not plan.is_empty:
            self.outstanding.append(plan)
        decodes = [self._name(handle) for handle in plan.sampled_handles[: len(plan.decode_seats)].tolist()]
        return [(name, 1) for name in decodes] + [(row.request.request_id, row.n) for row in plan.prefills]

    def land(self, **tokens):
        """Feed the oldest outstanding step: `tokens` by name, else new ones. Returns {name: token delivered}."""
        plan = self.outstanding.popleft()
        drawn = []
        for handle in plan.sampled_handles.tolist():
            drawn.append(tokens.get(self._name(handle), self._next_token))
            self._next_token += 1
        result = self.scheduler.apply(plan, StepOutput(np.array(drawn, np.int32)))
        for request in result.finished:
            self.ended[request.request_id] = request.finish_reason
        names = [self._name(handle) for handle in result.handles.tolist()]
        delivered = dict(zip(names, result.tokens.tolist(), strict=True))
        for name, token in delivered.items():
            self.tokens[name].append(token)
        self.scheduler.kv.check()
        return delivered

    def step(self, **tokens):
        """Plan, and feed at once. Returns the plan's rows."""
        rows = self.plan()
        if self.outstanding:
            self.land(**tokens)
        return rows

    def steps(self, n):
        """The rows of `n` steps."""
        return [self.step() for _ in range(n)]

    def drain(self, most=200):
        """Step until nothing is left; the rows of every step."""
        rows = []
        while self.scheduler.num_requests:
            rows.append(self.step())
            assert len(rows) < most, f"livelock: {list(self.scheduler.requests())}"
        while self.outstanding:
            self.land()
        return rows

    def abort(self, name):
        """End a request; True when it was there."""
        return self.scheduler.abort(self.requests[name].handle) is not None

    def places(self):
        """{name: place} of the requests that have not ended."""
        return {request.request_id: request.place for request in self.scheduler.requests()}

    @property
    def free(self):
        """Pages that could be given out."""
        return self.scheduler.kv.num_free

    def is_clean(self):
        """True when every page, seat and count is back."""
        load = self.scheduler.load()
        kv = self.scheduler.kv
        return (load.num_running, load.num_waiting, load.num_waiting_tokens, kv.num_free) == (0, 0, 0, kv.num_pages)

    def _name(self, handle):
        return next(request.request_id for request in self.requests.values() if request.handle == handle)
