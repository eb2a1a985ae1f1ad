"""Compiles grammars off the engine's thread, within bounds of size, depth, time and memory.

Bounds, for a grammar comes from a stranger:

    text            256 KiB; a regular expression 16 KiB (compiling it is quadratic: 45 KB took 4 s)
    JSON nesting    128 brackets (a schema nested 3,000 deep did not compile within 90 s)
    compile time    20 s, after which the request fails; the library cannot be interrupted, so the thread is
                    left to end by itself, and while 4 such threads run no other grammar is compiled
    cache           256 MiB of compiled grammars, least recently used first out
"""

from __future__ import annotations

import queue
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import CheckpointError, EquipoiseError, InvalidValueError
from equipoise.exec.torch.json_keywords import unheld_keyword
from equipoise.exec.torch.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import xgrammar

    from equipoise.request import Grammar

FIELD = "response_format"
MAX_TEXT_BYTES = 256 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_JSON_NESTING = 128
MAX_WHITESPACE = 32
"""Most whitespace characters in a row between the parts of a JSON text: enough to indent, too few to loop on."""

COMPILE_TIMEOUT_S = 20.0
MAX_STUCK = 4
_NUM_THREADS = 2
_CACHE_BYTES = 256 * 1024 * 1024
_MAX_REASON = 300
_NOT_IN_JSON = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Bytes that no JSON string may hold unescaped. xgrammar 0.2.8 lets them into strings with minLength or maxLength,
so tokens with one of them match nothing in JSON; the tab, legal between values, goes with the others."""


class GrammarCompiler:
    """Turns `Grammar`s into compiled ones, in threads of its own; the same grammar is compiled once.

    Thread-safe. The grammar library is imported and the tokenizer read by the first compilation."""

    def __init__(
        self,
        tokenizer_dir: Path,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """`stop_ids`: tokens that end a complete output. `cache_bytes` bounds what is kept for later requests."""
        self._toolbox = _Toolbox(tokenizer_dir, vocab_size, stop_ids)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._cache = _Cache(cache_bytes)
        self._waiting: dict[Grammar, list[Future[xgrammar.CompiledGrammar]]] = {}
        self._jobs: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stuck: list[threading.Thread] = []

    def cached(self, grammar: Grammar) -> xgrammar.CompiledGrammar | None:
        """The compiled grammar if it is at hand."""
        with self._lock:
            return self._cache.get(grammar)

    def compile(self, grammar: Grammar) -> Future[xgrammar.CompiledGrammar]:
        """Compile `grammar`; the future fails with InvalidValueError, one line, when it cannot be."""
        future: Future[xgrammar.CompiledGrammar] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(grammar, [])
            waiting.append(future)
            if len(waiting) == 1:
                self._start_threads()
                self._jobs.put(grammar)
        return future

    def close(self) -> None:
        """End the idle threads. A compilation under way ends by itself; idempotent."""
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            self._threads = []

    def _start_threads(self) -> None:
        while len(self._threads) < _NUM_THREADS:
            # daemons: a compilation that cannot be interrupted must not keep the process alive
            thread = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (grammar := self._jobs.get()) is not None:
            try:
                self._toolbox.open()
                outcome = self._compile_in_time(grammar)
            except Exception as error:  # handed to those who wait
                self._settle(grammar, error)
            else:
                self._settle(grammar, outcome)

    def _compile_in_time(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile in a thread of its own, so that this one outlives a compilation that does not end."""
        with self._lock:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            num_stuck = len(self._stuck)
        if num_stuck >= MAX_STUCK:
            raise InvalidValueError(f"{FIELD}: {num_stuck} grammars that take too long are being compiled", FIELD)
        outcomes: list[xgrammar.CompiledGrammar | Exception] = []
        thread = threading.Thread(target=self._toolbox.compile_into, args=(outcomes, grammar), daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not outcomes:
            with self._lock:
                self._stuck.append(thread)
            raise InvalidValueError(f"{FIELD}: the grammar took more than {self._timeout_s:g} s to compile", FIELD)
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]
        return outcomes[0]

    def _settle(self, grammar: Grammar, outcome: xgrammar.CompiledGrammar | Exception) -> None:
        with self._lock:
            waiting = self._waiting.pop(grammar)
            if not isinstance(outcome, Exception):
                self._cache.put(grammar, outcome)
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class _Cache:
    """Compiled grammars, bounded by bytes; the least recently used leaves first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Grammar, tuple[xgrammar.CompiledGrammar, int]] = OrderedDict()

    def get(self, grammar: Grammar) -> xgrammar.CompiledGrammar | None:
        entry = self._entries.get(grammar)
        if entry is None:
            return None
        self._entries.move_to_end(grammar)
        return entry[0]

    def put(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> None:
        num_bytes = compiled.memory_size_bytes + len(grammar.text)
        self._entries[grammar] = (compiled, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._num_bytes -= freed


@dataclass(frozen=True)
class _Compilers:
    """The library's compilers, by what their tokens may spell.

    text: all but special tokens, which spell no text that a client sees
    json: of these, the ones without bytes that JSON forbids
    tags: all; only a structural tag may name special tokens"""

    text: xgrammar.GrammarCompiler
    json: xgrammar.GrammarCompiler
    tags: xgrammar.GrammarCompiler


class _Toolbox:
    """The grammar library bound to a tokenizer; opened by the first compilation, as importing it takes seconds."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, stop_ids: tuple[int, ...]) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._stop_ids = [token for token in stop_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._compilers: _Compilers | None = None

    def open(self) -> _Compilers:
        """Import the library and read the tokenizer, once. Raises InvalidValueError when either cannot be had."""
        with self._lock:
            if self._compilers is None:
                try:
                    self._compilers = self._build()
                except (CheckpointError, ImportError) as error:
                    raise InvalidValueError(
                        f"{FIELD}: no structured output here: {_one_line(str(error))}", FIELD
                    ) from error
            return self._compilers

    def compile_into(self, outcomes: list[xgrammar.CompiledGrammar | Exception], grammar: Grammar) -> None:
        """Append the compiled grammar, or why there is none."""
        try:
            outcomes.append(_compile(self.open(), grammar))
        except EquipoiseError as error:
            outcomes.append(error)
        except Exception as error:  # the library raises RuntimeError and others for what it cannot compile
            outcomes.append(InvalidValueError(f"{FIELD}: the {grammar.kind} {_one_line(str(error))}", FIELD))

    def _build(self) -> _Compilers:
        import xgrammar

        vocabulary = read_vocabulary(self._tokenizer_dir, self._vocab_size)
        kind = xgrammar.VocabType[vocabulary.spelling.upper()]

        def info_of(tokens: list[str]) -> xgrammar.TokenizerInfo:
            return xgrammar.TokenizerInfo(tokens, kind, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids)

        plain = vocabulary.without_specials()
        info = info_of(plain)
        spelled = zip(plain, info.decoded_vocab, strict=True)
        in_json = info_of(["" if _NOT_IN_JSON.search(raw) else text for text, raw in spelled])
        everything = info_of(list(vocabulary.tokens))
        return _Compilers(
            *(
                xgrammar.GrammarCompiler(each, max_threads=1, cache_enabled=False)
                for each in (info, in_json, everything)
            )
        )


def _compile(compilers: _Compilers, grammar: Grammar) -> xgrammar.CompiledGrammar:
    check_grammar(grammar)
    match grammar.kind:
        case "json_schema":
            return compilers.json.compile_json_schema(grammar.text, max_whitespace_cnt=MAX_WHITESPACE)
        case "json_object":
            return compilers.json.compile_json_schema(
                '{"type":"object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
            )
        case "regex":
            return compilers.text.compile_regex(grammar.text)
        case "ebnf":
            return compilers.text.compile_grammar(grammar.text)
        case "structural_tag":
            return compilers.tags.compile_structural_tag(grammar.text)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidValueError for a text that is too long, too deep or not what its kind says."""
    most = MAX_REGEX_BYTES if grammar.kind == "regex" else MAX_TEXT_BYTES
    num_bytes = len(grammar.text.encode("utf-8", "replace"))
    if num_bytes > most:
        raise InvalidValueError(f"{FIELD}: the {grammar.kind} has {num_bytes} bytes, at most {most} are allowed", FIELD)
    if grammar.kind in ("json_schema", "structural_tag"):
        _check_json(grammar)


def _check_json(grammar: Grammar) -> None:
    try:
        root = msgspec.json.decode(grammar.text)
    except RecursionError:
        raise _too_deep(grammar) from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidValueError(
            f"{FIELD}: the {grammar.kind} is not valid JSON: {_one_line(str(error))}", FIELD
        ) from error
    if not isinstance(root, dict):
        raise InvalidValueError(f"{FIELD}: the {grammar.kind} must be a JSON object", FIELD)
    level: list[object] = [root]
    for _ in range(MAX_JSON_NESTING):
        level = [child for node in level for child in _children(node)]
        if not level:
            break
    else:
        raise _too_deep(grammar)
    keyword = unheld_keyword(root) if grammar.kind == "json_schema" else None
    if keyword is not None:
        raise InvalidValueError(f"{FIELD}: {keyword} in a JSON schema is not supported", FIELD)


def _too_deep(grammar: Grammar) -> InvalidValueError:
    return InvalidValueError(f"{FIELD}: the {grammar.kind} is nested more than {MAX_JSON_NESTING} levels deep", FIELD)


def _children(node: object) -> list[object]:
    """Objects and arrays directly inside `node`. Refuses references to other documents: nobody fetches them."""
    inside: Iterable[object] = node if isinstance(node, list) else ()
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise InvalidValueError(f'{FIELD}: "$ref" must start with "#", not {_one_line(reference)!r}', FIELD)
        inside = node.values()
    return [child for child in inside if isinstance(child, dict | list)]


def _one_line(reason: str) -> str:
    """The library's message without time, source file and echo of the input."""
    reason = re.sub(r"^\[[^\]]*\] \S+?:\d+: ", "", reason)
    reason = re.sub(r"^Check failed: \(.*?\) is \w+: ", "", reason)
    reason = reason.partition(" The JSON string is:")[0]
    reason = " ".join(reason.split())
    return reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "..."
