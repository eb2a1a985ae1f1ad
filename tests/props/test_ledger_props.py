"""Random legal moves in every role, with prompts replaced and outputs cleared meanwhile: the ledger forgets nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.sched.rig import make_request

from equipoise.sched.ledger import Ledger
from equipoise.sched.roles import ROLES

SEATED = {"prefilling", "decoding", "drafting", "verifying", "draining"}
QUEUED = {"waiting", "blocked", "returning"}

COUNTED = {
    "mixed": {"reqs": QUEUED, "tokens": QUEUED, "promises": {"loading", "waiting", "blocked"}},
    "prefill": {
        "reqs": QUEUED | {"bootstrap"},
        "tokens": QUEUED | {"bootstrap"},
        "promises": {"loading", "waiting", "blocked"},
    },
    "decode": {
        "reqs": QUEUED | {"prealloc", "transfer", "retracted"},
        "tokens": {"prealloc", "retracted", "returning"},
        "promises": {"transfer", "waiting", "blocked"},
    },
}
"""What a role counts as waiting, and where it may promise pages: as the load table of the design says."""

QUANTITIES = ("tokens", "cached", "promises", "chunks", "output", "sent")
WHICH = st.integers(0, 50)
SMALL = st.integers(0, 12)


class LedgerMachine(RuleBasedStateMachine):
    """`owed[handle]`: what a request was charged, by quantity, as a model of its own remembers it."""

    @initialize(role=st.sampled_from(sorted(ROLES)))
    def build(self, role):
        self.role = ROLES[role]
        self.ledger = Ledger(self.role)
        self.requests = []
        self.owed = {}
        self.steps = []
        self.num_made = 0

    @rule(prompt=st.integers(1, 20), max_tokens=st.integers(1, 20))
    def arrive(self, prompt, max_tokens):
        request = make_request(self.num_made, prompt=prompt, max_tokens=max_tokens)
        self.num_made += 1
        self.requests.append(request)
        self.owed[request.handle] = dict.fromkeys(QUANTITIES, 0)
        self.go(request, self.role.moves["new"][0])

    @rule(which=WHICH, step=WHICH, computed=SMALL)
    def move(self, which, step, computed):
        """Any request to any place that may come next."""
        if self.requests:
            request = self.requests[which % len(self.requests)]
            targets = self.role.moves[request.place]
            # Seldom to the end, or nobody would get far.
            to = targets[step % len(targets)] if targets and step % 7 else "ended"
            request.num_computed = min(computed, request.num_known - 1)
            self.go(request, to)

    @rule(which=WHICH, n=st.integers(1, 30))
    def replace_prompt(self, which, n):
        if self.requests:
            self.requests[which % len(self.requests)].prompt_ids = np.zeros(n, np.int32)

    @rule(which=WHICH, n=SMALL)
    def replace_outputs(self, which, n):
        """None at all, as often as not more than there were."""
        if self.requests:
            self.requests[which % len(self.requests)].output_ids = [0] * max(0, n - 4)

    @rule(which=WHICH, n=SMALL)
    def change_stop_length(self, which, n):
        if self.requests:
            self.requests[which % len(self.requests)].stop_len += n - 6

    @rule(which=WHICH, n=st.integers(1, 12))
    def compute(self, which, n):
        """A chunk of what a prefilling request still owes."""
        request, owed = self.pick(which, {"prefilling"})
        if request and owed["chunks"] > 0:
            n = min(n, owed["chunks"])
            owed["chunks"] -= n
            self.ledger.compute(request, n)

    @rule(which=WHICH, n=SMALL)
    def deliver(self, which, n):
        request, owed = self.pick(which, SEATED)
        if request:
            owed["output"] -= n
            self.ledger.deliver(n)

    @rule(which=WHICH, n=SMALL)
    def recognise(self, which, n):
        """Anywhere: a request whose tokens do not wait has none that are cached."""
        if self.requests:
            request = self.requests[which % len(self.requests)]
            owed = self.owed[request.handle]
            owed["cached"] = min(n, owed["tokens"])
            self.ledger.recognise(request, n)

    @rule(which=WHICH, n=SMALL)
    def promise(self, which, n):
        request, owed = self.pick(which, COUNTED[self.role.name]["promises"])
        if request:
            owed["promises"] = n
            self.ledger.reserve(request, n)

    @rule(n=st.integers(1, 5))
    def launch(self, n):
        self.steps.append(n)
        self.ledger.launch(n)

    @rule()
    def land(self):
        if self.steps:
            self.ledger.land(self.steps.pop(0))

    @invariant()
    def sums_are_what_is_owed(self):
        if not hasattr(self, "ledger"):
            return
        counted, sums = COUNTED[self.role.name], self.ledger.sums()
        assert sums == {
            "num_waiting_reqs": sum(request.place in counted["reqs"] for request in self.requests),
            "num_startable_reqs": sum(
                request.place in counted["reqs"] and request.place not in ("bootstrap", "transfer")
                for request in self.requests
            ),
            "num_waiting_tokens": self.total("tokens"),
            "num_waiting_cached_tokens": self.total("cached"),
            "num_reserved_pages": self.total("promises"),
            "num_prefilling_tokens": self.total("chunks"),
            "num_expected_output_tokens": self.total("output"),
            "num_sent_reqs": sum(request.place == "inflight" for request in self.requests),
            "num_sent_tokens": self.total("sent"),
        }
        assert sums == self.ledger.rescan(self.requests, lambda request: self.owed[request.handle]["output"])
        assert self.ledger.num_inflight_rows == sum(self.steps)

    def total(self, quantity):
        return sum(owed[quantity] for owed in self.owed.values())

    def pick(self, which, places):
        """A request in one of `places` and what it owes, (None, None) when there is none."""
        here = [request for request in self.requests if request.place in places]
        request = here[which % len(here)] if here else None
        return request, request and self.owed[request.handle]

    def go(self, request, to):
        """Move, in the ledger and in the model."""
        counted, owed, old = COUNTED[self.role.name], self.owed[request.handle], request.place
        if old in SEATED and to not in SEATED:
            self.ledger.settle(request, owed["output"])
        self.ledger.move(request, to)
        amounts = {
            "tokens": (counted["tokens"], request.num_known),
            "cached": (counted["tokens"], 0),
            "promises": (counted["promises"], 0),
            "chunks": ({"prefilling"}, request.num_known - request.num_computed),
            "output": (SEATED, request.stop_len - request.num_known),
            "sent": ({"inflight"}, request.num_computed),
        }
        for quantity, (places, amount) in amounts.items():
            if old not in places or to not in places:
                owed[quantity] = amount if to in places else 0
        if to == "ended":
            self.requests.remove(request)
            del self.owed[request.handle]


TestLedger = LedgerMachine.TestCase
