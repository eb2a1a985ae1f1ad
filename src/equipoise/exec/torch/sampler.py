"""From logits to tokens: penalties, bias, bans, grammar, temperature, filters, draw; one row per seat.

Order of operations, the convention of OpenAI-compatible servers:

    penalties -> logit_bias -> min_tokens ban -> grammar mask -> temperature -> top_k -> top_p -> min_p -> draw

What a batch does not ask for costs nothing: flags on the host say which rows need what, and nothing
here waits for the device except a grammar, whose next mask depends on the token just drawn.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.errors import InvariantError
from equipoise.exec.torch.filters import draw, floors
from equipoise.exec.torch.hostcopy import HostCopy
from equipoise.exec.torch.logprobs import PendingLogprobs, prompt_logprobs
from equipoise.exec.torch.noise import as_unsigned, uniforms
from equipoise.exec.torch.penalties import TokenCounts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from equipoise.exec.protocol import TokenLogprobs
    from equipoise.exec.torch.grammar import Grammars
    from equipoise.request import Request, SamplingParams

    Rows = NDArray[np.int64]

__all__ = ["MIN_TEMPERATURE", "Sampled", "Sampler", "prompt_logprobs"]

MIN_TEMPERATURE = 1e-5
"""A temperature below this is greedy: its quotients would overflow long after the draw became certain."""

NOT_FINITE = "the model computed logits that are not finite (NaN or infinity)"
NOTHING_ALLOWED = "no token is allowed here by grammar, logit_bias and min_tokens together"

# What a seat asks for, as bits of its flag.
_RANDOM = 1
_FILTERED = 2  # top_k or top_p: the likeliest tokens are needed in order
_MIN_P = 4
_PENALISED = 8
_BIASED = 16
_GRAMMAR = 32
_LOGPROBS = 64
_EDITED = _PENALISED | _BIASED | _GRAMMAR


class Sampled:
    """The tokens of one step, on the device; reading `failed` or `logprobs` waits for this step, not for later ones.

    tokens: (S,) int64. The token of a failed row is some valid id.
    """

    __slots__ = ("_emptied", "_failed", "_finite", "_logprob_rows", "_pending", "_refused", "tokens")

    def __init__(self, tokens: Tensor, peaks: Tensor) -> None:
        """peaks: (S,) the greatest logit of each row, which is not finite when any of the row is NaN or +inf."""
        self.tokens = tokens
        self._finite = HostCopy(torch.isfinite(peaks))
        self._emptied: tuple[Rows, HostCopy] | None = None
        self._refused: dict[int, str] = {}
        self._logprob_rows: list[int] = []
        self._pending: PendingLogprobs | None = None
        self._failed: dict[int, str] | None = None

    @property
    def failed(self) -> dict[int, str]:
        """Why a row could not be sampled, by row."""
        if self._failed is None:
            self._failed = self._find_failed()
        return self._failed

    @property
    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By row, for the rows that asked and did not fail: of the model's raw distribution (see logprobs.py)."""
        if self._pending is None:
            return {}
        by_row = zip(self._logprob_rows, self._pending.read(), strict=True)
        return {row: entry for row, entry in by_row if row not in self.failed}

    def note_edited(self, rows: Rows, peaks: Tensor) -> None:
        """peaks: (n,) the greatest logit of each of `rows` after the edits; -inf: nothing was left to draw."""
        self._emptied = (rows, HostCopy(peaks == -torch.inf))

    def note_refused(self, row: int, reason: str) -> None:
        """The grammar refused the token of `row`."""
        self._refused[row] = reason

    def note_logprobs(self, rows: list[int], pending: PendingLogprobs) -> None:
        """`pending` holds the logprobs of `rows`, in order."""
        self._logprob_rows = rows
        self._pending = pending

    def _find_failed(self) -> dict[int, str]:
        """The cause comes before its consequence: logits that are not finite, nothing allowed, token refused."""
        failed = dict(self._refused)
        if self._emptied is not None:
            rows, emptied = self._emptied
            failed.update(dict.fromkeys(rows[emptied.wait()[0].numpy()].tolist(), NOTHING_ALLOWED))
        infinite = ~self._finite.wait()[0].numpy()
        failed.update(dict.fromkeys(np.flatnonzero(infinite).tolist(), NOT_FINITE))
        return failed


class _Seats:
    """Sampling parameters as columns indexed by seat; `handle` is -1 until a seat's first request."""

    def __init__(self, num_seats: int) -> None:
        self.handle = np.full(num_seats, -1, np.int64)
        self.flags = np.zeros(num_seats, np.uint8)
        self.seed = np.zeros(num_seats, np.uint64)
        self.temperature = np.ones(num_seats, np.float32)
        self.top_k = np.zeros(num_seats, np.int64)
        self.top_p = np.ones(num_seats, np.float64)
        self.min_p_floor = np.full(num_seats, -np.inf, np.float32)
        self.penalties = np.zeros((3, num_seats), np.float32)  # repetition, presence, frequency
        self.banned_until = np.zeros(num_seats, np.int64)  # stop ids are banned at positions before this one
        self.num_logprobs = np.zeros(num_seats, np.int64)
        none = np.empty(0, np.int64)
        self.stop_ids: list[Rows] = [none] * num_seats
        self.bias_ids: list[Rows] = [none] * num_seats
        self.bias: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * num_seats

    def set(self, seat: int, request: Request, seed: np.uint64, vocab_size: int) -> None:
        """Write the parameters of `request`; token ids that no logit belongs to are left out."""
        params = request.params
        self.handle[seat] = request.handle
        self.flags[seat] = _flags_of(params, vocab_size)
        self.seed[seat] = seed
        self.temperature[seat] = params.temperature
        self.top_k[seat] = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.top_p[seat] = params.top_p
        self.min_p_floor[seat] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.penalties[:, seat] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        stop_ids = np.array([token for token in request.stop_ids if token < vocab_size], np.int64)
        self.stop_ids[seat] = stop_ids
        self.banned_until[seat] = request.num_prompt + params.min_tokens if stop_ids.size else 0
        self.num_logprobs[seat] = params.logprobs or 0
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab_size}
        self.bias_ids[seat] = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias[seat] = np.fromiter(bias.values(), np.float32, len(bias))


def _flags_of(params: SamplingParams, vocab_size: int) -> int:
    flags = 0
    if params.temperature >= MIN_TEMPERATURE and params.top_k != 1:
        flags |= _RANDOM
        if params.top_p < 1 or 0 < params.top_k < vocab_size:
            flags |= _FILTERED
        if params.min_p > 0:
            flags |= _MIN_P
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
        flags |= _PENALISED
    if params.logit_bias:
        flags |= _BIASED
    if params.grammar is not None:
        flags |= _GRAMMAR
    if params.logprobs is not None:
        flags |= _LOGPROBS
    return flags


class Sampler:
    """Draws the tokens of a step and keeps, per seat, what the next draw depends on.

    Everything is advanced inside `sample`, in step order, never by results that come back: a step may
    follow another whose tokens the host has not seen. Call `seat`, `sample` and `forget` from one thread, in
    step order. A seat may be sampled once more after its request was forgotten: harmless.

    A seeded draw is a function of (logits, seed, position) alone. A request without a seed draws one when
    it is first seated and keeps it until `forget`, so preemption does not change it either.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device, grammars: Grammars | None = None) -> None:
        """`vocab_size`: ids that may be drawn; logits may be wider, and what lies beyond is never drawn."""
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._seats = _Seats(num_seats)
        self._counts = TokenCounts(num_seats, vocab_size, device)
        self._drawn_seeds: dict[int, int] = {}

    @torch.inference_mode()
    def seat(self, seat: int, request: Request, known_tokens: NDArray[np.int32]) -> None:
        """`request` took `seat`. known_tokens: (num_known,), its prompt and the outputs that it has already.

        Counts and grammar are brought to just these outputs, whatever was kept from before a preemption."""
        self._seats.set(seat, request, as_unsigned(self._seed_of(request)), self._vocab_size)
        prompt, outputs = known_tokens[: request.num_prompt], known_tokens[request.num_prompt :]
        flags = self._seats.flags[seat]
        if flags & _PENALISED:
            self._counts.start(seat, prompt, outputs)
        else:
            self._counts.stop(seat)
        if flags & _GRAMMAR:
            self._require_grammars().seat(request, outputs.tolist())

    def forget(self, request: Request) -> None:
        """`request` ended: drop its drawn seed and its grammar."""
        self._drawn_seeds.pop(request.handle, None)
        if self._grammars is not None:
            self._grammars.forget(request)

    @torch.inference_mode()
    def sample(self, logits: Tensor, seats: NDArray[np.int64], positions: NDArray[np.int64]) -> Sampled:
        """Draw the token of each row. A row that fails harms no other.

        logits: (S, V) float32, not changed; seats: (S,) distinct; positions: (S,) that each token will have."""
        logits = logits[:, : self._vocab_size]
        flags = self._seats.flags[seats]
        banned = positions < self._seats.banned_until[seats]
        peaks, tokens = logits.max(dim=-1)
        sampled = Sampled(tokens, peaks)
        if not flags.any() and not banned.any():
            return sampled
        rows = np.flatnonzero(banned | (flags & (_EDITED | _RANDOM)).astype(bool))
        if rows.size:
            drawn = self._sample_rows(logits, peaks, seats, positions, rows, banned, sampled)
            tokens[self._index(rows)] = drawn
        self._advance(tokens, seats, flags, sampled)
        wanted = np.flatnonzero(flags & _LOGPROBS)
        if wanted.size:
            num_top = self._seats.num_logprobs[seats[wanted]].tolist()
            index = self._index(wanted)
            sampled.note_logprobs(wanted.tolist(), PendingLogprobs(logits[index], tokens[index], num_top))
        return sampled

    def _sample_rows(
        self,
        logits: Tensor,
        peaks: Tensor,
        seats: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Rows,
        banned: NDArray[np.bool_],
        sampled: Sampled,
    ) -> Tensor:
        """Tokens (n,) of `rows`, those that plain argmax does not serve."""
        seats, positions, banned = seats[rows], positions[rows], banned[rows]
        flags = self._seats.flags[seats]
        work = logits if len(rows) == len(logits) else logits[self._index(rows)]
        if banned.any() or (flags & _EDITED).any():
            work = self._edited(work.clone() if work is logits else work, seats, flags, banned)
            peaks, tokens = work.max(dim=-1)
            sampled.note_edited(rows, peaks)
        else:
            peaks, tokens = (part[self._index(rows)] for part in (peaks, sampled.tokens))
        random = np.flatnonzero(flags & _RANDOM)
        if random.size:
            index = self._index(random)
            part = work if len(random) == len(work) else work[index]
            tokens[index] = self._draw(part, peaks[index], seats[random], flags[random], positions[random])
        return tokens

    def _edited(
        self, work: Tensor, seats: NDArray[np.int64], flags: NDArray[np.uint8], banned: NDArray[np.bool_]
    ) -> Tensor:
        """The logits (n, V) after penalties, bias, bans and grammar; `work` is overwritten."""
        penalised = np.flatnonzero(flags & _PENALISED)
        if penalised.size:
            index, who = self._index(penalised), seats[penalised]
            work[index] = self._counts.penalise(work[index], who, *self._seats.penalties[:, who])
        biased = np.flatnonzero(flags & _BIASED)
        if biased.size:
            cells = self._cells(biased, [self._seats.bias_ids[seat] for seat in seats[biased]])
            work[cells] += self._device_copy(np.concatenate([self._seats.bias[seat] for seat in seats[biased]]))
        ruled = (flags & _GRAMMAR).astype(bool)
        stopless = np.flatnonzero(banned & ~ruled)
        if stopless.size:
            work[self._cells(stopless, [self._seats.stop_ids[seat] for seat in seats[stopless]])] = -torch.inf
        if ruled.any():
            self._mask(work, np.flatnonzero(ruled), seats, banned)
        return work

    def _mask(self, work: Tensor, rows: Rows, seats: NDArray[np.int64], banned: NDArray[np.bool_]) -> None:
        """Forbid in `rows` what their grammars forbid, and stop ids while they are banned (see Grammars.mask)."""
        none = np.empty(0, np.int64)
        bans = [self._seats.stop_ids[seats[row]] if banned[row] else none for row in rows]
        bits = self._require_grammars().mask(self._seats.handle[seats[rows]].tolist(), bans)
        allowed = _unpack(self._device_copy(bits), work.shape[1])
        index = self._index(rows)
        work[index] = work[index].masked_fill_(~allowed, -torch.inf)

    def _draw(
        self,
        work: Tensor,
        peaks: Tensor,
        seats: NDArray[np.int64],
        flags: NDArray[np.uint8],
        positions: NDArray[np.int64],
    ) -> Tensor:
        """Random tokens (n,) of `work` (n, V), which is not changed; `peaks` (n,) are its greatest logits."""
        columns = self._seats
        temperature = self._device_copy(columns.temperature[seats])
        scores = work.sub(peaks[:, None]).div_(temperature[:, None])  # at most 0, so exp cannot overflow
        floor: Tensor | None = None
        if (flags & _MIN_P).any():
            floor = self._device_copy(columns.min_p_floor[seats])
        filtered = np.flatnonzero(flags & _FILTERED)
        if filtered.size:
            index, who = self._index(filtered), seats[filtered]
            if floor is None:
                floor = scores.new_full((len(scores),), -torch.inf)
            part = scores if len(filtered) == len(scores) else scores[index]
            floor[index] = torch.maximum(floor[index], floors(part, columns.top_k[who], columns.top_p[who]))
        return draw(scores, self._device_copy(uniforms(columns.seed[seats], positions)), floor)

    def _advance(self, tokens: Tensor, seats: NDArray[np.int64], flags: NDArray[np.uint8], sampled: Sampled) -> None:
        """Bring counts and grammars past the tokens just drawn."""
        penalised = np.flatnonzero(flags & _PENALISED)
        if penalised.size:
            self._counts.add(seats[penalised], tokens[self._index(penalised)])
        ruled = np.flatnonzero(flags & _GRAMMAR)
        if ruled.size:
            grammars = self._require_grammars()
            drawn = tokens[self._index(ruled)].tolist()
            for row, token in zip(ruled.tolist(), drawn, strict=True):
                reason = grammars.accept(int(self._seats.handle[seats[row]]), token)
                if reason is not None:
                    sampled.note_refused(row, reason)

    def _seed_of(self, request: Request) -> int:
        if request.params.seed is not None:
            return request.params.seed
        return self._drawn_seeds.setdefault(request.handle, secrets.randbits(63))

    def _require_grammars(self) -> Grammars:
        if self._grammars is None:
            raise InvariantError("a request with a grammar was seated, but this sampler was built without grammars")
        return self._grammars

    def _index(self, rows: Rows) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _device_copy(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _cells(self, rows: Rows, ids: list[Rows]) -> tuple[Tensor, Tensor]:
        """Indices of the tokens `ids[i]` in row `rows[i]`."""
        return self._index(np.repeat(rows, [len(part) for part in ids])), self._index(np.concatenate(ids))


def _unpack(bits: Tensor, width: int) -> Tensor:
    """(n, words) int32, bit i of word w for token 32 w + i -> (n, width) bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :width].bool()
