"""Structured output: per request, which tokens its grammar allows next.

The state of a request is kept by handle, from `prepare` to `forget`, and advanced by `accept` as soon
as its token is drawn. When its output is complete only stop ids are allowed, and after one of them only
stop ids again: so a request with `ignore_eos` fills the rest of its length with end tokens, which stand
for no text, and what the client reads stays valid. Special tokens never match text.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from equipoise.errors import InvalidValueError, InvariantError
from equipoise.exec.torch.grammar_compiler import FIELD, GrammarCompiler

if TYPE_CHECKING:
    from pathlib import Path

    import xgrammar
    from numpy.typing import NDArray

    from equipoise.request import Request

_BITS = 32  # tokens per word of a mask

ALLOWANCE_S = 2.0
TOKEN_ALLOWANCE_S = 0.005
"""CPU seconds that a request's grammar may take in all: so many, and so many more for each token.

Ordinary grammars take microseconds a token. One that can read its output in very many ways ("((1*)*)*1") takes
more with every token, seconds after some hundred, and every other request of the step waits for it."""


class _State:
    """How far a request's output has come in its grammar.

    `accepted` are the tokens the matcher has taken; `broken` says why it can take no more; `spent_s` is the CPU
    time that it took so far."""

    __slots__ = ("_matcher", "accepted", "broken", "spent_s", "stop_ids")

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_ids: tuple[int, ...]) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        self.stop_ids = stop_ids
        self.accepted: list[int] = []
        self.broken: str | None = None
        self.spent_s = 0.0

    @property
    def is_over(self) -> bool:
        """A stop id was drawn, or the grammar can go no further: only stop ids may follow."""
        return self.broken is not None or bool(self._matcher.is_terminated())

    def accept(self, token: int) -> str | None:
        """Take `token`; the reason when the grammar refuses it, now and ever after."""
        if self.broken is None and not self._takes(token):
            self.broken = f"the grammar does not allow token {token} after {len(self.accepted)} output tokens"
        self.accepted.append(token)
        return self.broken

    def restore(self, outputs: list[int]) -> None:
        """Bring the state to `outputs`, whatever it was."""
        if self.accepted == outputs:
            return
        self._matcher.reset()
        self.accepted, self.broken = [], None
        for token in outputs:
            self.accept(token)

    def fill(self, bits: NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens into `bits[row]`."""
        if self.is_over:
            bits[row] = 0
            _set_bits(bits[row], self.stop_ids)
        else:
            start = time.thread_time()
            self._matcher.fill_next_token_bitmask(bits, row)
            self._charge(start)

    def _takes(self, token: int) -> bool:
        if self._matcher.is_terminated():
            return token in self.stop_ids
        start = time.thread_time()
        taken = bool(self._matcher.accept_token(token))
        self._charge(start)
        return taken

    def _charge(self, start: float) -> None:
        """Count the CPU time since `start`; the grammar is broken once its allowance is spent."""
        self.spent_s += time.thread_time() - start
        allowed = ALLOWANCE_S + TOKEN_ALLOWANCE_S * len(self.accepted)
        if self.spent_s > allowed and self.broken is None:
            self.broken = (
                f"the grammar took more than the {allowed:.1f} s of computing that {len(self.accepted)} output tokens "
                "are allowed: it can read the same text in too many ways"
            )


class Grammars:
    """The grammars of a rank's requests.

    `prepare` may come from any thread; `seat`, `mask`, `accept` and `forget` from the thread that samples, in
    step order. A handle without a state (its request ended) is not constrained: such a row's token is dropped."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        """`tokenizer_dir` holds tokenizer.json; `vocab_size` is the width of the logits; `stop_ids` the
        model's end tokens. Nothing is read or imported until the first grammar comes."""
        self._vocab_size = vocab_size
        self._stop_ids = tuple(token for token in stop_ids if token < vocab_size)
        self._compiler = GrammarCompiler(tokenizer_dir, vocab_size, stop_ids)
        self._lock = threading.Lock()
        self._compiled: dict[int, xgrammar.CompiledGrammar] = {}
        self._waiting: dict[int, Future[None]] = {}
        self._states: dict[int, _State] = {}

    def prepare(self, request: Request) -> Future[None] | None:
        """Start compiling the grammar of `request`; None when it has none or it is at hand.

        The future fails with InvalidValueError (field "response_format", one line) for a grammar that does
        not compile or passes a bound (see grammar_compiler.py), and when there is no token to end it with."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        ready: Future[None] = Future()
        if not self._stop_ids_of(request):
            ready.set_exception(
                InvalidValueError(f"{FIELD}: this model has no end token, so it needs stop_token_ids", FIELD)
            )
            return ready
        handle = request.handle
        compiled = self._compiler.cached(grammar)
        with self._lock:
            if compiled is not None:
                self._compiled[handle] = compiled
                return None
            self._waiting[handle] = ready
        self._compiler.compile(grammar).add_done_callback(lambda done: self._settle(handle, done))
        return ready

    def forget(self, request: Request) -> None:
        """`request` ended: drop its grammar; a future that still waits for it is cancelled."""
        with self._lock:
            waiting = self._waiting.pop(request.handle, None)
            self._compiled.pop(request.handle, None)
            self._states.pop(request.handle, None)
        if waiting is not None:
            waiting.cancel()

    def seat(self, request: Request, outputs: list[int]) -> None:
        """`request` took a seat with these outputs: its state is made to match them exactly.

        Raises InvariantError when it was never prepared."""
        handle = request.handle
        with self._lock:
            state = self._states.get(handle)
            compiled = self._compiled.get(handle)
        if state is None:
            if compiled is None:
                raise InvariantError(f"{request!r} was seated before its grammar was compiled")
            state = _State(compiled, self._stop_ids_of(request))
            self._states[handle] = state
        state.restore(outputs)

    def mask(self, handles: list[int], bans: list[NDArray[np.int64]]) -> NDArray[np.int32]:
        """Allowed tokens, one row per handle: (n, ceil(vocab_size / 32)) int32, bit i of word w for token 32 w + i.

        Tokens of `bans[i]` are taken out of row i, unless nothing else is allowed: a complete output ends,
        even before min_tokens."""
        bits = np.full((len(handles), -(-self._vocab_size // _BITS)), -1, np.int32)
        for row, (handle, banned) in enumerate(zip(handles, bans, strict=True)):
            state = self._states.get(handle)
            if state is not None:
                state.fill(bits, row)
            if banned.size:
                _take_out(bits[row], banned)
        return bits

    def accept(self, handle: int, token: int) -> str | None:
        """`token` was drawn for `handle`; why its grammar refuses it, or None."""
        state = self._states.get(handle)
        return None if state is None else state.accept(token)

    def close(self) -> None:
        """End the compiler's threads; idempotent."""
        self._compiler.close()

    def _stop_ids_of(self, request: Request) -> tuple[int, ...]:
        own = tuple(token for token in request.stop_ids if token < self._vocab_size)
        return self._stop_ids or own

    def _settle(self, handle: int, done: Future[xgrammar.CompiledGrammar]) -> None:
        error = done.exception()
        with self._lock:
            ready = self._waiting.pop(handle, None)
            if ready is None:
                return  # forgotten meanwhile
            if error is None:
                self._compiled[handle] = done.result()
        if not ready.set_running_or_notify_cancel():
            return
        if error is None:
            ready.set_result(None)
        else:
            ready.set_exception(error)


def _set_bits(words: NDArray[np.int32], tokens: tuple[int, ...]) -> None:
    unsigned = words.view(np.uint32)
    for token in tokens:
        unsigned[token // _BITS] |= np.uint32(1 << token % _BITS)


def _take_out(words: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    """Clear the bits of `tokens` in place, unless that would clear all."""
    left = words.view(np.uint32).copy()
    np.bitwise_and.at(left, tokens // _BITS, ~(np.uint32(1) << (tokens % _BITS).astype(np.uint32)))
    if left.any():
        words[:] = left.view(np.int32)
