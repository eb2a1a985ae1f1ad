"""Structured output with real tokenizers and the real grammar library: random logits, valid texts."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from equipoise.errors import CheckpointError, InvalidValueError, InvariantError
from equipoise.exec.torch.grammar import Grammars
from equipoise.exec.torch.grammar_compiler import GrammarCompiler
from equipoise.exec.torch.sampler import NOTHING_ALLOWED, Sampler
from equipoise.exec.torch.vocabulary import read_vocabulary
from equipoise.request import Grammar, Request, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

EOS_TEXT = "<|end|>"
MARKER = "<|user|>"
SAMPLE = '{"name": "añb", "age": 42, "tags": ["x", "yes", "no"], "ok": true} hello world, αβγ 0123456789 {}[]:,'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["yes", "no"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE] * 20, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijnemty0123456789{}[]:,.-",
        '"',
        "▁a",
        "▁{",
        "ye",
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("y", "e")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def characters() -> Tokenizer:
    vocab = {chr(i + 32): i for i in range(95)} | {"\n": 95, "é": 96, "<unk>": 97, "\x17": 98, "\t": 99}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "raw": characters}


class Model:
    """A tokenizer in a folder and random logits somewhat wider than its vocabulary."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken(EOS_TEXT, special=True), AddedToken(MARKER, special=True)])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.folder = folder
        self.tokenizer = tokenizer
        self.eos = tokenizer.token_to_id(EOS_TEXT)
        self.marker = tokenizer.token_to_id(MARKER)
        self.width = tokenizer.get_vocab_size() + 13
        self.grammars = Grammars(folder, self.width, (self.eos,))
        self.next_handle = 0

    def request(self, grammar: Grammar, **params) -> Request:
        self.next_handle += 1
        eos_ids = params.pop("eos_ids", (self.eos,))
        return Request(
            self.next_handle,
            f"r{self.next_handle}",
            np.array([0, 1], np.int32),
            SamplingParams(grammar=grammar, seed=params.pop("seed", self.next_handle), **params),
            max_model_len=10_000,
            eos_ids=eos_ids,
        )

    def ready(self, grammar: Grammar, **params) -> Request:
        request = self.request(grammar, **params)
        future = self.grammars.prepare(request)
        if future is not None:
            future.result(timeout=60)
        return request

    def refusal(self, grammar: Grammar, **params) -> str:
        future = self.grammars.prepare(self.request(grammar, **params))
        assert future is not None
        with pytest.raises(InvalidValueError) as caught:
            future.result(timeout=60)
        assert caught.value.field == "response_format"
        assert "\n" not in caught.value.message
        assert ".cc" not in caught.value.message
        return caught.value.message

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


class Run:
    """Samples a batch of requests from random logits, each until its stop token."""

    def __init__(self, model: Model, requests: list[Request], boosts: dict[int, float] | None = None) -> None:
        self.model = model
        self.requests = requests
        self.sampler = Sampler(len(requests), model.width, torch.device("cpu"), model.grammars)
        self.rng = np.random.default_rng(len(requests))
        self.boosts = boosts or {}
        self.drawn: list[list[int]] = [[] for _ in requests]
        self.failed: dict[int, str] = {}
        for seat, request in enumerate(requests):
            self.sampler.seat(seat, request, request.prompt_ids)

    def step(self, rows: list[int]) -> None:
        logits = self.rng.normal(0, 2, (len(rows), self.model.width)).astype(np.float32)
        for token, boost in self.boosts.items():
            logits[:, token] += boost
        positions = np.array([2 + len(self.drawn[row]) for row in rows], np.int64)
        sampled = self.sampler.sample(torch.from_numpy(logits), np.array(rows, np.int64), positions)
        for i, row in enumerate(rows):
            if i in sampled.failed:
                self.failed[row] = sampled.failed[i]
            self.drawn[row].append(int(sampled.tokens[i]))

    def to_the_end(self, max_steps: int = 400) -> list[str]:
        for _ in range(max_steps):
            going = [row for row, drawn in enumerate(self.drawn) if not drawn or drawn[-1] != self.model.eos]
            if not going:
                break
            self.step(going)
        assert self.failed == {}
        return [self.model.text(drawn) for drawn in self.drawn]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    made = Model(tmp_path_factory.mktemp(request.param), KINDS[request.param]())
    yield made
    made.grammars.close()


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    made = Model(tmp_path_factory.mktemp("chars"), characters())
    yield made
    made.grammars.close()


def test_spelling_is_detected(tmp_path):
    for kind, build in KINDS.items():
        folder = tmp_path / kind
        folder.mkdir()
        made = Model(folder, build())
        vocabulary = read_vocabulary(folder, made.width)
        assert vocabulary.spelling == kind
        assert len(vocabulary.tokens) == made.width
        assert vocabulary.special_ids == {made.eos, made.marker}


def test_random_logits_follow_a_schema(model):
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    run = Run(model, [model.ready(grammar) for _ in range(8)], {model.marker: 20.0})
    texts = run.to_the_end()
    for text in texts:
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"yes", "no"}
        assert len(value["tags"]) <= 3
    assert len(set(texts)) == 8
    assert all(len(drawn) < 400 and drawn[-1] == model.eos for drawn in run.drawn)
    assert not any(model.marker in drawn for drawn in run.drawn)


def test_random_logits_follow_a_regex_with_wide_characters(model):
    pattern = r"(yes|nié)-[0-9]{3}(,[a-c ]+)?"
    requests = [model.ready(Grammar("regex", pattern)) for _ in range(12)]
    for text in Run(model, requests, {model.eos: 5.0}).to_the_end():
        assert re.fullmatch(pattern, text)


def test_ebnf_and_structural_tags(model):
    requests = [
        model.ready(Grammar("ebnf", 'root ::= pair ("," pair)*\npair ::= [a-c] "=" [0-9]')),
        model.ready(
            Grammar(
                "structural_tag",
                json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {
                            "type": "tag",
                            "begin": "{t}",
                            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                            "end": "{e}",
                        },
                    }
                ),
            )
        ),
    ]
    first, second = Run(model, requests, {model.eos: 6.0}).to_the_end()
    assert re.fullmatch(r"[a-c]=\d(,[a-c]=\d)*", first)
    assert re.fullmatch(r"\{t\}-?\d+\{e\}", second)


def test_json_object_gives_an_object_of_any_keys(model):
    helpful = {model.tokenizer.encode(ch).ids[0]: 6.0 for ch in '}]"'} | {model.eos: 6.0}
    requests = [model.ready(Grammar("json_object"), seed=i) for i in range(10)]
    values = [json.loads(text) for text in Run(model, requests, helpful).to_the_end(3000)]
    assert all(isinstance(value, dict) for value in values)
    assert any(values)


def test_rows_without_a_grammar_are_left_alone(chars):
    grammar = Grammar("regex", "[0-9]{4}")
    plain = Request(
        900,
        "plain",
        np.array([0, 1], np.int32),
        SamplingParams(temperature=0.0),
        max_model_len=99,
        eos_ids=(chars.eos,),
    )
    run = Run(chars, [plain, chars.ready(grammar), chars.ready(grammar, temperature=0.0)], {50: 40.0})
    for _ in range(4):
        run.step([0, 1, 2])
    assert run.drawn[0] == [50] * 4
    assert all(re.fullmatch(r"\d{4}", chars.text(drawn)) for drawn in run.drawn[1:])


def test_a_complete_output_allows_only_stop_ids_and_ignore_eos_fills_up_with_them(chars):
    going_on = chars.ready(Grammar("regex", "ab"), ignore_eos=True)
    run = Run(chars, [going_on])
    for _ in range(6):
        run.step([0])
    assert run.drawn[0][2:] == [chars.eos] * 4
    assert chars.text(run.drawn[0]) == "ab"
    assert run.failed == {}


def test_min_tokens_holds_while_the_grammar_allows_more(chars):
    long = chars.ready(Grammar("regex", "[ab]*"), min_tokens=9)
    short = chars.ready(Grammar("regex", "ab"), min_tokens=9)
    run = Run(chars, [long, short], {chars.eos: 30.0})
    first, second = run.to_the_end()
    assert re.fullmatch("[ab]{9}", first)
    assert second == "ab"


def test_the_token_after_a_stop_is_harmless(chars):
    run = Run(chars, [chars.ready(Grammar("regex", "a"))])
    for _ in range(3):
        run.step([0])
    run.sampler.forget(run.requests[0])
    run.step([0])
    assert run.failed == {}


def test_the_state_follows_the_outputs_after_preemption(chars):
    """Kept, behind and ahead of what the seat knows: in each case the outputs decide."""
    pattern = "a(b|c)d(e|f)g"
    for cut in range(5):
        request = chars.ready(Grammar("regex", pattern))
        run = Run(chars, [request])
        for _ in range(3):
            run.step([0])
        outputs = run.drawn[0][:cut] if cut <= 3 else [*run.drawn[0], chars.tokenizer.token_to_id("f")]
        run.sampler.seat(0, request, np.array([0, 1, *outputs], np.int32))
        run.drawn[0] = list(outputs)
        assert re.fullmatch(pattern, run.to_the_end()[0])


def test_a_grammar_and_a_bias_that_leave_nothing_fail_that_row_alone(chars):
    grammar = Grammar("regex", "[ab]{3}")
    run = Run(chars, [chars.ready(grammar), chars.ready(grammar)])
    logits = torch.zeros(2, chars.width)
    logits[0, [chars.tokenizer.token_to_id(ch) for ch in "ab"]] = -torch.inf
    sampled = run.sampler.sample(logits, np.array([0, 1], np.int64), np.array([2, 2]))
    assert sampled.failed == {0: NOTHING_ALLOWED}
    assert chars.text([int(sampled.tokens[1])]) in ("a", "b")


def test_a_refused_token_breaks_the_request_until_it_is_seated_with_other_outputs(chars):
    request = chars.ready(Grammar("regex", "abc"))
    a, b, z = (chars.tokenizer.token_to_id(ch) for ch in "abz")
    grammars = chars.grammars
    grammars.seat(request, [])
    assert grammars.accept(request.handle, a) is None
    reason = grammars.accept(request.handle, z)
    assert reason == f"the grammar does not allow token {z} after 1 output tokens"
    assert grammars.accept(request.handle, b) == reason
    grammars.seat(request, [a])
    assert grammars.accept(request.handle, b) is None


def test_a_second_request_finds_the_grammar_compiled(chars):
    grammar = Grammar("regex", "second")
    first, second = chars.request(grammar), chars.request(grammar)
    waiting = [chars.grammars.prepare(first), chars.grammars.prepare(second)]
    for future in waiting:
        if future is not None:
            assert future.result(timeout=60) is None
    assert chars.grammars.prepare(chars.request(grammar)) is None
    assert Run(chars, [first, second]).to_the_end() == ["second", "second"]


def test_the_cache_is_bounded_and_drops_the_least_recently_used(chars):
    wanted = [Grammar("regex", f"(a{i}|b{i})[0-9]{{1,50}}") for i in range(10, 40)]
    unbounded = GrammarCompiler(chars.folder, chars.width, (chars.eos,))
    one = unbounded.compile(wanted[0]).result(timeout=60).memory_size_bytes
    unbounded.close()
    compiler = GrammarCompiler(chars.folder, chars.width, (chars.eos,), cache_bytes=6 * one)
    for grammar in wanted:
        compiler.compile(grammar).result(timeout=60)
        compiler.cached(wanted[0])
    held = [grammar for grammar in wanted if compiler.cached(grammar)]
    compiler.close()
    assert held[0] == wanted[0]
    assert held[-1] == wanted[-1]
    assert 3 <= len(held) <= 6


def test_forget_cancels_what_is_being_compiled_and_seating_needs_prepare(chars):
    slow = chars.request(Grammar("regex", "(" + "|".join("abc" * i for i in range(1, 90)) + ")*"))
    future = chars.grammars.prepare(slow)
    assert future is not None
    chars.grammars.forget(slow)
    with pytest.raises(CancelledError):
        future.result(timeout=60)
    with pytest.raises(InvariantError, match="before its grammar was compiled"):
        chars.grammars.seat(slow, [])


def test_no_grammar_means_nothing_to_prepare(chars):
    request = Request(1, "r", np.array([1], np.int32), SamplingParams(), max_model_len=9)
    assert chars.grammars.prepare(request) is None


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("json_schema", ""), "not valid JSON"),
        (Grammar("json_schema", '{"a": "\udc80"}'), "not valid JSON"),
        (Grammar("json_schema", "[1]"), "must be a JSON object"),
        (Grammar("json_schema", '{"type": "foo"}'), 'Unsupported type "foo"'),
        (Grammar("json_schema", '{"type": 3}'), "Type should be a string"),
        (Grammar("json_schema", '{"$ref": "#/defs/x"}'), "Cannot find field defs"),
        (Grammar("json_schema", '{"items": {"$ref": "http://x.example/y"}}'), 'must start with "#"'),
        (Grammar("json_schema", '{"type": "string", "pattern": "(a"}'), "parenthesis is not closed"),
        (Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "nested more than 128"),
        (Grammar("json_schema", "[" * 100_000), "nested more than 128"),
        (Grammar("json_schema", '{"title": "' + "x" * 270_000 + '"}'), "at most 262144"),
        (Grammar("regex", "(a"), "parenthesis is not closed"),
        (Grammar("regex", "(?=a)b"), "Lookahead"),
        (Grammar("regex", "a" * 17_000), "at most 16384"),
        (Grammar("ebnf", "root ::= "), "Expect element"),
        (Grammar("ebnf", 'word ::= "a"'), "root rule"),
        (Grammar("structural_tag", '{"type": "x"}'), "structural_tag"),
        (Grammar("structural_tag", "nonsense"), "not valid JSON"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused(chars, grammar, why):
    message = chars.refusal(grammar)
    assert message.startswith("response_format: ")
    assert why in message
    assert len(message) < 400


def test_a_property_named_ref_is_no_reference(chars):
    schema = {"type": "object", "properties": {"$ref": {"type": "boolean"}}, "required": ["$ref"]}
    request = chars.ready(Grammar("json_schema", json.dumps(schema)))
    assert list(json.loads(Run(chars, [request]).to_the_end()[0])) == ["$ref"]


def test_a_compilation_that_takes_too_long_fails_and_others_go_on(chars):
    """A timeout no grammar can meet stands for a grammar that does not end."""
    impatient = GrammarCompiler(chars.folder, chars.width, (chars.eos,), timeout_s=0.0)
    slow = "(" + "|".join("abc" * i for i in range(1, 90)) + ")*"
    for _ in range(3):
        with pytest.raises(InvalidValueError, match="more than 0 s"):
            impatient.compile(Grammar("regex", slow)).result(timeout=60)
    impatient.close()


def test_a_grammar_that_reads_its_output_in_too_many_ways_fails_in_time(chars):
    request = chars.ready(Grammar("regex", "((a*)*)*b"))
    letter = chars.tokenizer.token_to_id("a")
    chars.grammars.seat(request, [])
    start = time.thread_time()
    reason, none = None, np.empty(0, np.int64)
    while reason is None and time.thread_time() - start < 20:
        chars.grammars.mask([request.handle], [none])
        reason = chars.grammars.accept(request.handle, letter)
    assert reason is not None
    assert "too many ways" in reason
    chars.grammars.forget(request)


def test_a_model_without_an_end_token_needs_stop_ids(tmp_path):
    model = Model(tmp_path, characters())
    model.grammars = Grammars(tmp_path, model.width, ())
    assert "no end token" in model.refusal(Grammar("regex", "ab"), eos_ids=())
    own = model.tokenizer.token_to_id("!")
    request = model.ready(Grammar("regex", "ab"), stop_token_ids=(own,), eos_ids=())
    run = Run(model, [request])
    for _ in range(3):
        run.step([0])
    assert run.drawn[0][2] == own
    model.grammars.close()


@pytest.mark.parametrize("kind", ["missing", "broken", "word pieces"])
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path, kind):
    if kind == "broken":
        (tmp_path / "tokenizer.json").write_text("{")
    elif kind == "word pieces":
        tokenizer = Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "a": 1, "b": 2, "##c": 3}, unk_token="[UNK]"))
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer") as caught:
        read_vocabulary(tmp_path, 10)
    assert "\n" not in str(caught.value)
    compiler = GrammarCompiler(tmp_path, 10, (1,))
    with pytest.raises(InvalidValueError, match="no structured output here: "):
        compiler.compile(Grammar("regex", "a")).result(timeout=60)
    compiler.close()


def test_nothing_is_imported_or_started_before_the_first_grammar(tmp_path):
    before = threading.active_count()
    grammars = Grammars(tmp_path / "nowhere", 100, (1,))
    assert threading.active_count() == before
    grammars.close()
