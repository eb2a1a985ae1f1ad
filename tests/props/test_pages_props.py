"""Random lives of requests in paged KV memory, against a model that knows what every page holds."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.sched.rig import make_request

from equipoise.kv.paged import PagedKV, known_tokens

SALTS = ("", "tenant")
MAX_TOKENS = 40


class PagesMachine(RuleBasedStateMachine):
    """`content[page]`: the salt and all tokens up to the end of the page, as the request that filled it wrote them."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.sampled_from([1, 2, 4]), shares=st.booleans())
    def build(self, num_pages, page_size, shares):
        self.kv = PagedKV(num_pages, page_size, prefix_cache=shares)
        self.shares = shares
        self.size = page_size
        self.waiting = []
        self.running = []
        self.num_made = 0
        self.content = {}
        self.written = {}

    @rule(family=st.integers(0, 1), n=st.integers(1, MAX_TOKENS - 1), salt=st.sampled_from(SALTS), own=st.booleans())
    def arrive(self, family, n, salt, own):
        """Prompts of a family share their beginning; `own` ones end in a token that no other has."""
        tokens = [family * 7 + i % 5 for i in range(n)]
        tokens[-1] += 1000 * (self.num_made + 1) if own else 0
        self.waiting.append(make_request(self.num_made, prompt=tokens, cache_salt=salt, max_model_len=10_000))
        self.num_made += 1

    @rule(which=st.integers(0, 50), share=st.integers(1, 100), extra=st.integers(0, 4))
    def admit(self, which, share, extra):
        """Admit with a first chunk that is a share of what is left, and ask for a margin."""
        if not self.waiting:
            return
        request = self.waiting[which % len(self.waiting)]
        kv, free, cached = self.kv, self.kv.num_free, self.kv.num_cached
        match = kv.match(request)
        self.check_match(request, match)
        left = request.num_known - match.num_tokens
        upto = match.num_tokens + max(1, left * share // 100)
        reserve = -(-upto // self.size) - len(match.pages) + extra
        if not kv.admit(request, match, upto, reserve):
            assert (kv.num_free, kv.num_cached, request.pages) == (free, cached, [])
            return
        assert request.pages[: len(match.pages)] == match.pages
        self.waiting.remove(request)
        self.running.append(request)
        self.written[request.handle] = match.num_tokens
        self.write(request, upto)

    @rule(which=st.integers(0, 50), n=st.integers(1, 6))
    def run_chunk(self, which, n):
        """Compute the next tokens; past the known ones, one that is drawn now."""
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        upto = min(self.written[request.handle] + n, request.num_known)
        if upto == self.written[request.handle]:
            request.output_ids.append(3 * len(request.output_ids) + request.handle % 2)
            upto += 1
        pages, free = list(request.pages), self.kv.num_free
        if self.kv.grow(request, upto):
            self.write(request, upto)
        else:
            assert (request.pages, self.kv.num_free) == (pages, free)

    @rule(which=st.integers(0, 50), comes_back=st.booleans())
    def leave(self, which, comes_back):
        """End or be preempted."""
        if self.running:
            request = self.running.pop(which % len(self.running))
            self.kv.release(request)
            assert request.pages == []
            if comes_back:
                self.waiting.append(request)

    @rule()
    def flush(self):
        cached = self.kv.num_cached
        assert self.kv.flush() == cached
        assert self.kv.num_cached == 0
        assert all(self.kv.match(request).num_tokens == 0 for request in self.waiting)

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        owned = {page for request in self.running for page in request.pages}
        assert self.kv.num_free + len(owned) == self.kv.num_pages

    @invariant()
    def every_request_reads_what_it_wrote(self):
        for request in getattr(self, "running", ()):
            tokens = known_tokens(request)
            for i in range(self.written[request.handle] // self.size):
                assert self.content[request.pages[i]] == self.holding(request, tokens, i)

    def write(self, request, upto):
        """The tokens [written, upto) are computed; their full pages may be matched from now on."""
        tokens = known_tokens(request)
        for i in range(self.written[request.handle] // self.size, -(-upto // self.size)):
            self.content[request.pages[i]] = self.holding(request, tokens[:upto], i)
        self.written[request.handle] = upto
        self.kv.publish(request, tokens, upto)

    def holding(self, request, tokens, i):
        return request.cache_salt, np.asarray(tokens[: (i + 1) * self.size]).tobytes()

    def check_match(self, request, match):
        """Every matched page holds this very prefix, and at least a token is left to compute."""
        assert match.num_tokens == len(match.pages) * self.size < request.num_known
        assert self.shares or not match.pages
        for i, page in enumerate(match.pages):
            assert self.content[page] == self.holding(request, known_tokens(request), i)


TestPages = PagesMachine.TestCase
