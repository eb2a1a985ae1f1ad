"""The sampler against a naive distribution, row by row, and against chi-square bounds (all seeds fixed)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch

from equipoise.errors import InvariantError
from equipoise.exec.torch.filters import draw, floors
from equipoise.exec.torch.noise import uniforms
from equipoise.exec.torch.penalties import TokenCounts
from equipoise.exec.torch.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler, prompt_logprobs
from equipoise.request import Grammar, Request, SamplingParams

VOCAB = 24
EOS = 7
CPU = torch.device("cpu")
PROMPT = (1, 2, 3, 3)
OUTPUTS = (5, 5, 9, 2)
FIRST = len(PROMPT)  # position of the first output


def make_request(handle: int = 0, prompt=PROMPT, **params) -> Request:
    return Request(
        handle,
        f"r{handle}",
        np.array(prompt, np.int32),
        SamplingParams(**params),
        max_model_len=100_000,
        eos_ids=(EOS,),
    )


@dataclass
class Bench:
    """A sampler whose seat i holds requests[i], each with the same known outputs."""

    requests: list[Request]
    outputs: tuple[int, ...] = ()
    num_seats: int = 0
    vocab: int = VOCAB
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.num_seats or len(self.requests), self.vocab, CPU)
        for seat, request in enumerate(self.requests):
            self.sampler.seat(seat, request, np.array([*request.prompt_ids, *self.outputs], np.int32))

    def sample(self, logits, position=None):
        count = len(self.requests)
        position = len(PROMPT) + len(self.outputs) if position is None else position
        return self.sampler.sample(
            torch.tensor(np.asarray(logits), dtype=torch.float32),
            np.arange(count, dtype=np.int64),
            np.full(count, position, np.int64),
        )


def naive_logits(logits, params: SamplingParams, outputs=(), position=FIRST) -> list[float]:
    """The logits after every edit, one token at a time, in plain Python."""
    edited = []
    for token, value in enumerate(float(x) for x in logits):
        if token in PROMPT or token in outputs:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        times = list(outputs).count(token)
        value -= times * params.frequency_penalty
        if times:
            value -= params.presence_penalty
        value += (params.logit_bias or {}).get(token, 0.0)
        banned = position - len(PROMPT) < params.min_tokens and token in (EOS, *params.stop_token_ids)
        edited.append(float("-inf") if banned else value)
    return edited


def naive_distribution(logits, params: SamplingParams, outputs=(), position=FIRST) -> np.ndarray:
    """Probability of each token, by the definitions, in float64."""
    scaled = np.array(naive_logits(logits, params, outputs, position)) / params.temperature
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    likeliest = sorted(range(len(chances)), key=lambda token: -chances[token])
    if params.top_k > 0:
        likeliest = likeliest[: params.top_k]
    mass, nucleus = sum(chances[t] for t in likeliest), []
    for token in likeliest:
        if sum(chances[t] for t in nucleus) >= params.top_p * mass:
            break
        nucleus.append(token)
    kept = [t for t in nucleus if chances[t] >= params.min_p * chances.max()]
    result = np.zeros(len(chances))
    result[kept] = chances[kept]
    return result / result.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic, and a bound that a right sampler passes with probability well over 0.9999."""
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return float(((observed - wanted) ** 2 / wanted).sum()), freedom + 5 * (2 * freedom) ** 0.5 + 10


LOGITS = np.random.default_rng(11).normal(0, 2, VOCAB)

EDITS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.4},
    "presence": {"presence_penalty": 1.5},
    "presence negative": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.2},
    "bias": {"logit_bias": {4: 3.0, 5: -100.0, 20: 6.5}},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": (int(LOGITS.argmax()), 3)},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
        "logit_bias": {9: 2.0, EOS: 50.0},
        "min_tokens": 30,
    },
}
FILTERS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_k wide": {"top_k": 10_000},
    "top_k off": {"top_k": -1},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "top_k top_p": {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    "top_p min_p": {"top_p": 0.95, "min_p": 0.05, "temperature": 2.0},
    "everything": {"top_k": 9, "top_p": 0.9, "min_p": 0.04, "temperature": 1.8},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_greedy_takes_the_best_edited_logit(edit):
    rng = np.random.default_rng(3)
    bench = Bench([make_request(i, temperature=0.0, **edit) for i in range(40)], OUTPUTS)
    logits = rng.normal(0, 2, (40, VOCAB))
    position = len(PROMPT) + len(OUTPUTS)
    expected = [int(np.argmax(naive_logits(row, bench.requests[0].params, OUTPUTS, position))) for row in logits]
    sampled = bench.sample(logits)
    assert sampled.tokens.tolist() == expected
    assert sampled.failed == {}
    assert sampled.logprobs == {}


@pytest.mark.parametrize("edit", ["none", "all"])
@pytest.mark.parametrize("name", FILTERS)
def test_random_rows_follow_the_naive_distribution(name, edit):
    params = FILTERS[name] | EDITS[edit]
    count, rounds = 500, 12
    bench = Bench([make_request(i, seed=1000 + i, **params) for i in range(count)], OUTPUTS)
    expected = naive_distribution(LOGITS, bench.requests[0].params, OUTPUTS, len(PROMPT) + len(OUTPUTS))
    tally = np.zeros(VOCAB)
    for position in range(rounds):
        # penalised seats are seated anew, so that every draw comes from the same distribution
        if edit == "all":
            bench = Bench(bench.requests, OUTPUTS)
        tokens = bench.sample(np.tile(LOGITS, (count, 1)), len(PROMPT) + len(OUTPUTS) + position).tokens
        tally += np.bincount(tokens.numpy(), minlength=VOCAB)
    assert tally[expected == 0].sum() == 0
    statistic, bound = chi_square(tally, expected * count * rounds)
    assert statistic < bound


def test_unseeded_rows_are_random_and_each_on_its_own():
    count = 3000
    bench = Bench([make_request(i) for i in range(count)])
    tokens = bench.sample(np.tile(LOGITS, (count, 1))).tokens.numpy()
    statistic, bound = chi_square(
        np.bincount(tokens, minlength=VOCAB), naive_distribution(LOGITS, SamplingParams()) * count
    )
    assert statistic < 2 * bound


def test_a_drawn_seed_lasts_until_forget():
    request = make_request(5)
    known = np.array(PROMPT, np.int32)
    sampler = Sampler(2, VOCAB, CPU)

    def tokens_at(seat: int) -> list[int]:
        sampler.seat(seat, request, known)
        flat = torch.zeros(1, VOCAB)
        return [int(sampler.sample(flat, np.array([seat], np.int64), np.array([p])).tokens[0]) for p in range(4, 44)]

    first = tokens_at(0)
    assert tokens_at(1) == first
    sampler.forget(request)
    assert tokens_at(0) != first


def test_seeds_are_told_apart_with_all_their_bits():
    bench = Bench([make_request(i, seed=seed) for i, seed in enumerate((0, 1, -1, 2**63 - 1, -(2**63), 2**32))])
    flat = np.zeros((6, VOCAB))
    columns = np.array([bench.sample(flat, position).tokens.tolist() for position in range(4, 40)]).T
    assert len({tuple(column) for column in columns}) == 6


def test_uniforms_are_uniform_over_positions_and_over_seeds():
    many = np.arange(40_000)
    for seeds, positions in ((np.zeros_like(many), many), (many, np.full_like(many, 17)), (many // 200, many % 200)):
        numbers = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        assert 0 <= numbers.min() < numbers.max() < 1
        statistic, bound = chi_square(np.histogram(numbers, 64, (0, 1))[0], np.full(64, len(many) / 64))
        assert statistic < bound
        pairs = np.histogram2d(numbers[:-1], numbers[1:], 16, ((0, 1), (0, 1)))[0].ravel()
        statistic, bound = chi_square(pairs, np.full(256, (len(many) - 1) / 256))
        assert statistic < bound


def test_no_seed_is_another_one_moved_along():
    """Seeds a whole generator step apart: the case that a plain counter gets wrong."""
    step = np.uint64(0x9E3779B97F4A7C15)
    positions = np.arange(100)
    ahead = uniforms(np.full(100, 5, np.uint64), positions + 1)
    assert not np.intersect1d(uniforms(np.full(100, 5, np.uint64) + step, positions), ahead).size


@pytest.mark.parametrize("temperature", [1e-5, 1e-9, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    rng = np.random.default_rng(5)
    bench = Bench([make_request(i, temperature=temperature, top_p=0.9, seed=i) for i in range(50)])
    logits = rng.normal(0, 30, (50, VOCAB))
    sampled = bench.sample(logits)
    assert sampled.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert sampled.failed == {}


def test_huge_logits_and_high_temperature_do_not_overflow():
    logits = np.zeros((2, VOCAB))
    logits[:, 4] = 3e38
    logits[:, 5] = -3e38
    sampled = Bench([make_request(0, temperature=100.0, seed=1), make_request(1, temperature=0.01, seed=1)]).sample(
        logits
    )
    assert sampled.tokens.tolist() == [4, 4]
    assert sampled.failed == {}


def test_a_token_of_probability_zero_is_never_drawn():
    scores = torch.tensor([[-torch.inf, 0.0, -1.0, 0.0, -torch.inf]] * 3)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(scores, uniforms, torch.full((3,), -0.5)).tolist() == [1, 3, 3]


def test_top_k_of_one_is_greedy_even_among_equals():
    bench = Bench([make_request(i, top_k=1, seed=i) for i in range(50)])
    assert set(bench.sample(np.zeros((50, VOCAB))).tokens.tolist()) == {0}


@pytest.mark.parametrize("width", [50, 3000])
def test_floors_of_wide_vocabularies(width):
    """Heads, whole sorts and both kinds of limit, against a floor found by walking down the sorted row."""
    rng = np.random.default_rng(width)
    limits = [(width, 0.3), (width, 0.9999), (width, 1.0), (7, 1.0), (40, 0.5), (2000, 0.999), (2000, 0.5)]
    scores = rng.normal(0, 1.5, (len(limits), width)).astype(np.float32)
    scores[1] *= 0.001  # flat: its nucleus is nearly the whole row
    scores -= scores.max(axis=1, keepdims=True)
    top_k = np.array([min(k, width) for k, _ in limits])
    top_p = np.array([p for _, p in limits])
    found = floors(torch.from_numpy(scores), top_k, top_p).numpy()
    for row, (most, share) in enumerate(limits):
        ordered = np.sort(scores[row])[::-1][:most].astype(np.float64)
        mass = np.exp(ordered)
        length = next(n for n in range(1, len(mass) + 1) if mass[:n].sum() >= share * mass.sum() * (1 - 1e-9))
        assert found[row] == pytest.approx(ordered[length - 1], abs=2e-6), (row, length)


def test_a_nucleus_that_is_met_exactly_takes_no_further_token():
    scores = torch.tensor([0.5, 1.0, 0.5]).log()[None]
    assert floors(scores, np.array([3]), np.array([0.5])).tolist() == [0.0]


def test_padding_of_the_vocabulary_is_never_drawn():
    requests = [
        make_request(0, temperature=0.0),
        make_request(1, seed=3),
        make_request(2, temperature=0.0, repetition_penalty=1.2, logprobs=2),
    ]
    logits = np.tile(np.append(LOGITS, [90.0] * 8), (3, 1))
    sampled = Bench(requests).sample(logits)
    assert sampled.tokens.max() < VOCAB
    assert max(sampled.logprobs[2].top_ids) < VOCAB


def test_min_tokens_ends_at_its_position():
    request = make_request(0, temperature=0.0, min_tokens=3, stop_token_ids=(8,))
    bench = Bench([request])
    logits = np.zeros((1, VOCAB))
    logits[0, [EOS, 8, 11]] = 9.0, 8.0, 7.0
    drawn = [int(bench.sample(logits, len(PROMPT) + i).tokens[0]) for i in range(5)]
    assert drawn == [11, 11, 11, EOS, EOS]


def test_min_tokens_with_ignore_eos_bans_only_stop_token_ids():
    bench = Bench([make_request(0, temperature=0.0, min_tokens=3, stop_token_ids=(8,), ignore_eos=True)])
    logits = np.zeros((1, VOCAB))
    logits[0, [EOS, 8]] = 8.0, 9.0
    assert bench.sample(logits).tokens.tolist() == [EOS]


def test_counts_go_on_inside_sample():
    """Frequency 1 on logits one apart: each draw lowers the token, before any result is read back."""
    bench = Bench([make_request(0, temperature=0.0, frequency_penalty=1.0)])
    logits = np.full((1, VOCAB), -50.0)
    logits[0, [10, 11, 12]] = 3.0, 2.5, 0.9
    drawn = [int(bench.sample(logits, len(PROMPT) + i).tokens[0]) for i in range(6)]
    assert drawn == [10, 11, 10, 11, 10, 12]


def test_a_resumed_request_goes_on_as_if_never_preempted():
    params = {"seed": 4, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.2, "top_p": 0.95}
    rng = np.random.default_rng(8)
    steps = rng.normal(0, 1, (30, 1, VOCAB))
    whole = Bench([make_request(0, **params)])
    straight = [int(whole.sample(logits, len(PROMPT) + i).tokens[0]) for i, logits in enumerate(steps)]
    sampler, request, drawn = Sampler(3, VOCAB, CPU), make_request(0, **params), []
    for i, logits in enumerate(steps):
        if i % 7 == 0:  # preempted and seated elsewhere, the old seat taken by somebody else
            sampler.seat((i + 2) % 3, make_request(100 + i, repetition_penalty=2.0), np.array([14, 15], np.int32))
            seat = i % 3
            sampler.seat(seat, request, np.array([*PROMPT, *drawn], np.int32))
        sampled = sampler.sample(
            torch.tensor(logits, dtype=torch.float32), np.array([seat], np.int64), np.array([len(PROMPT) + i])
        )
        drawn.append(int(sampled.tokens[0]))
    assert drawn == straight


def test_a_seat_keeps_nothing_of_the_request_before():
    heavy = {"temperature": 0.0, "repetition_penalty": 9.0, "logit_bias": {3: 100.0}, "min_tokens": 90, "logprobs": 2}
    sampler = Sampler(1, VOCAB, CPU)
    sampler.seat(0, make_request(0, **heavy), np.array(PROMPT, np.int32))
    sampler.seat(0, make_request(1, temperature=0.0), np.array(PROMPT, np.int32))
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 1.0
    sampled = sampler.sample(logits, np.array([0], np.int64), np.array([len(PROMPT)]))
    assert sampled.tokens.tolist() == [EOS]
    assert sampled.logprobs == {}


def test_counts_are_allocated_only_for_penalised_seats():
    counts = TokenCounts(64, VOCAB, CPU)
    assert counts.num_slots == 0
    none = np.empty(0, np.int32)
    for seat in range(64):
        counts.start(seat, none, none)
        counts.stop(seat)
    assert counts.num_slots == 4
    for seat in range(64):
        counts.start(seat, none, none)
    assert counts.num_slots == 64


def test_a_slot_keeps_nothing_of_the_request_before():
    counts = TokenCounts(4, VOCAB, CPU)
    one, none = np.ones(1, np.float32), np.empty(0, np.int32)
    for seat in range(4):
        counts.start(seat, np.arange(VOCAB, dtype=np.int32), np.arange(VOCAB, dtype=np.int32))
        counts.stop(seat)
    counts.start(2, np.array([5], np.int32), none)
    flat = torch.full((1, VOCAB), 8.0)
    changed = counts.penalise(flat, np.array([2], np.int64), 2 * one, one, one) != flat
    assert changed.nonzero()[:, 1].tolist() == [5]


def test_seats_give_their_counts_back():
    sampler = Sampler(64, VOCAB, CPU)
    for seat in range(64):
        sampler.seat(seat, make_request(seat, presence_penalty=1.0), np.array(PROMPT, np.int32))
        sampler.seat(seat, make_request(100 + seat), np.array(PROMPT, np.int32))
    assert sampler._counts.num_slots == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    kinds = (
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 1, "top_p": 0.5},
        {"temperature": 0.0, "presence_penalty": 1.0},
    )
    requests = [make_request(i, logprobs=1, **kind) for i, kind in enumerate(kinds * 2)]
    logits = np.tile(LOGITS, (8, 1))
    good = Bench(requests).sample(logits)
    logits[:4, 6] = bad
    mixed = Bench(requests).sample(logits)
    assert mixed.failed == dict.fromkeys(range(4), NOT_FINITE)
    assert mixed.tokens[4:].tolist() == good.tokens[4:].tolist()
    assert mixed.logprobs == {row: entry for row, entry in good.logprobs.items() if row >= 4}
    assert 0 <= mixed.tokens.min() <= mixed.tokens.max() < VOCAB


def test_rows_of_minus_infinity_fail_and_single_ones_do_not():
    logits = np.tile(LOGITS, (2, 1))
    logits[0] = -np.inf
    logits[1, :-1] = -np.inf
    sampled = Bench([make_request(0, seed=1), make_request(1, seed=1, repetition_penalty=1.5)]).sample(logits)
    assert sampled.failed == {0: NOT_FINITE}
    assert sampled.tokens[1] == VOCAB - 1


def test_a_row_with_nothing_left_to_draw_fails_alone():
    only_stop = np.full((2, VOCAB), -np.inf)
    only_stop[:, EOS] = 1.0
    requests = [make_request(0, temperature=0.0, min_tokens=5), make_request(1, temperature=0.0)]
    sampled = Bench(requests).sample(only_stop)
    assert sampled.failed == {0: NOTHING_ALLOWED}
    assert sampled.tokens[1] == EOS


def test_logprobs_are_of_the_raw_distribution():
    biased = make_request(0, temperature=0.5, logit_bias={2: 100.0}, top_k=3, seed=1, logprobs=4)
    alone = make_request(1, temperature=0.0, logprobs=0)
    silent = make_request(2, temperature=0.0)
    sampled = Bench([biased, alone, silent]).sample(np.tile(LOGITS, (3, 1)))
    raw = LOGITS - np.log(np.exp(LOGITS).sum())
    order = np.argsort(-raw)
    assert sampled.logprobs.keys() == {0, 1}
    first = sampled.logprobs[0]
    assert first.token_id == 2
    assert first.logprob == pytest.approx(raw[2], abs=1e-5)
    assert first.rank == 1 + order.tolist().index(2)
    assert first.top_ids == order[:4].tolist()
    assert first.top_logprobs == pytest.approx(raw[order[:4]].tolist(), abs=1e-5)
    second = sampled.logprobs[1]
    assert (second.token_id, second.rank, second.top_ids, second.top_logprobs) == (int(order[0]), 1, [], [])


def test_logprobs_can_be_sent_as_json():
    logits = np.full((1, VOCAB), -np.inf)
    logits[0, 3] = 0.0
    sampled = Bench([make_request(0, temperature=0.0, logprobs=3)]).sample(logits)
    assert msgspec.json.decode(msgspec.json.encode(sampled.logprobs[0]))[4] == [0.0, -9999.0, -9999.0]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_prompt_logprobs(count):
    rng = np.random.default_rng(count)
    logits = rng.normal(0, 3, (count, VOCAB))
    targets = rng.integers(0, VOCAB, count)
    entries = prompt_logprobs(torch.tensor(logits, dtype=torch.float32), torch.tensor(targets), 2)
    assert len(entries) == count
    for row, target, entry in zip(logits, targets, entries, strict=True):
        raw = row - np.log(np.exp(row).sum())
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(raw[target], abs=1e-5)
        assert entry.rank == 1 + int((raw > raw[target]).sum())
        assert entry.top_ids == np.argsort(-raw)[:2].tolist()


def test_plain_greedy_is_one_reduction():
    """No kernel but the reduction and the finiteness check: nothing sorts, copies or waits."""
    bench = Bench([make_request(i, temperature=0.0) for i in range(4)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bench.sampler.sample(torch.zeros(4, VOCAB), np.arange(4, dtype=np.int64), np.full(4, 9))
    kernels = {event.key for event in profile.key_averages()}
    assert "aten::max" in kernels
    assert not kernels & {"aten::sort", "aten::topk", "aten::exp", "aten::cumsum", "aten::index", "aten::item"}


def test_logits_are_not_changed():
    requests = [
        make_request(i, **kind) for i, kind in enumerate([EDITS["all"], {"seed": 2}, {"seed": 2, "min_p": 0.2}])
    ]
    bench = Bench(requests)
    logits = torch.tensor(np.tile(LOGITS, (3, 1)), dtype=torch.float32)
    before = logits.clone()
    bench.sampler.sample(logits, np.arange(3, dtype=np.int64), np.full(3, len(PROMPT)))
    assert torch.equal(logits, before)


def test_ids_outside_the_vocabulary_are_left_out():
    request = make_request(
        0,
        prompt=(1, 500),
        temperature=0.0,
        repetition_penalty=1.5,
        logit_bias={900: 5.0},
        min_tokens=2,
        stop_token_ids=(700,),
    )
    bench = Bench([request])
    assert bench.sample(LOGITS[None], 2).failed == {}


def test_a_grammar_without_grammars_is_a_bug():
    with pytest.raises(InvariantError, match="without grammars"):
        Bench([make_request(0, grammar=Grammar("regex", "a"))])
