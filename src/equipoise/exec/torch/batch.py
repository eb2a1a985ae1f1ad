"""A step's tensors, gathered from the columns when the step is submitted.

Everything is copied: what the scheduler plans next may change the columns while the step runs.

Tokens of a step are laid out decodes first, then the prefill chunks, in the plan's order; row r of
`tables` belongs to decode r, or to chunk r - num_decodes. `T` tokens, `R` rows, `S` sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from equipoise.request import Request
    from equipoise.sched.columns import Columns
    from equipoise.sched.plan import PrefillRow, StepPlan

SHORT_CHUNK = 8
"""A chunk of up to this many tokens attends token by token, like decodes: no keys are gathered for it."""


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, first + n) of the step: positions [start, start + n) of table row `row`."""

    first: int
    n: int
    start: int
    row: int


@dataclass(frozen=True, eq=False)
class Singles:
    """Query tokens that attend one by one: tokens[i] sees positions [0, lens[i]) of table row rows[i].

    tokens, rows, lens: (count,) int32. tables: (R, width) int32, stale past a row's last page."""

    count: int
    max_len: int
    tokens: Tensor
    rows: Tensor
    lens: Tensor
    tables: Tensor


@dataclass(frozen=True, eq=False)
class Seating:
    """A request that took a seat in this step, with its known tokens (num_known,) int32."""

    seat: int
    request: Request
    known: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PromptSpan:
    """Prompt logprobs that a chunk owes: of targets[i], by the logits of the step's token first + i."""

    handle: int
    first: int
    num_top: int
    targets: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's inputs on the device; the input tokens of decodes are filled in when the step runs.

    token_ids, positions, page_ids, offsets: (T,) int64
    logit_rows: (S + prompt logprob rows,) int64, the tokens whose logits are needed, sampled rows first
    sampled_seats, sampled_at: (S,) int64, on the host
    """

    num_decodes: int
    decode_seats: Tensor
    token_ids: Tensor
    positions: Tensor
    page_ids: Tensor
    offsets: Tensor
    singles: Singles
    chunks: tuple[Chunk, ...]
    logit_rows: Tensor
    sampled_index: Tensor
    sampled_seats: NDArray[np.int64]
    sampled_at: NDArray[np.int64]
    seatings: tuple[Seating, ...] = ()
    prompt_spans: tuple[PromptSpan, ...] = field(default=())


def gather_batch(
    columns: Columns, plan: StepPlan, device: torch.device, prompt_spans: tuple[PromptSpan, ...] = ()
) -> Batch:
    """The inputs of `plan`, which is not empty. Copies all that it reads of `columns`."""
    page_size, decode_starts, num_decodes = columns.page_size, plan.decode_starts, len(plan.decode_seats)
    seats = np.concatenate((plan.decode_seats, np.array([row.seat for row in plan.prefills], np.int32)))
    ends = np.concatenate((decode_starts + 1, np.array([row.start + row.n for row in plan.prefills], np.int64)))
    tables = columns.page_table[seats, : -(-int(ends.max()) // page_size)]

    positions = np.concatenate((decode_starts, *(np.arange(r.start, r.start + r.n) for r in plan.prefills)))
    counts = np.ones(len(seats), np.int64)
    counts[num_decodes:] = [row.n for row in plan.prefills]
    token_rows = np.repeat(np.arange(len(seats)), counts)
    token_ids = np.zeros(len(positions), np.int64)
    chunks = _lay_out(plan.prefills, num_decodes)
    for chunk, row in zip(chunks, plan.prefills, strict=True):
        token_ids[chunk.first : chunk.first + chunk.n] = columns.tokens[row.seat, row.start : row.start + row.n]

    def put(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return Batch(
        num_decodes=num_decodes,
        decode_seats=put(plan.decode_seats.astype(np.int64)),
        token_ids=put(token_ids),
        positions=put(positions),
        page_ids=put(tables[token_rows, positions // page_size].astype(np.int64)),
        offsets=put(positions % page_size),
        singles=_singles(chunks, token_rows, positions, put(tables), put),
        chunks=tuple(chunk for chunk in chunks if chunk.n > SHORT_CHUNK),
        logit_rows=put(_logit_rows(plan, chunks, prompt_spans)),
        sampled_index=put(plan.sampled_seats.astype(np.int64)),
        sampled_seats=plan.sampled_seats.copy(),
        sampled_at=plan.sampled_at.copy(),
        seatings=_seatings(columns, plan),
        prompt_spans=prompt_spans,
    )


def prompt_spans(columns: Columns, plan: StepPlan, reported: dict[int, int]) -> tuple[PromptSpan, ...]:
    """What the chunks of `plan` owe to requests that asked for prompt logprobs.

    The logits at position p score the prompt's token p + 1, which may be the next chunk's first. `reported`
    maps a handle to the first position not yet reported and is brought up to date, so that a prompt that is
    computed again after a preemption is not reported twice."""
    spans = []
    for chunk, row in zip(_lay_out(plan.prefills, len(plan.decode_seats)), plan.prefills, strict=True):
        num_top = row.request.params.prompt_logprobs
        if num_top is None:
            continue
        start = max(row.start + 1, reported.get(row.request.handle, 1))
        end = min(row.start + row.n + 1, row.request.num_prompt)
        if start < end:
            reported[row.request.handle] = end
            targets = columns.tokens[row.seat, start:end].copy()
            spans.append(PromptSpan(row.request.handle, chunk.first + start - 1 - row.start, num_top, targets))
    return tuple(spans)


def _lay_out(prefills: list[PrefillRow], num_decodes: int) -> list[Chunk]:
    chunks, first = [], num_decodes
    for i, row in enumerate(prefills):
        chunks.append(Chunk(first, row.n, row.start, num_decodes + i))
        first += row.n
    return chunks


def _singles(
    chunks: list[Chunk],
    token_rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    tables: Tensor,
    put: Callable[[NDArray[np.generic]], Tensor],
) -> Singles:
    is_single = np.ones(len(positions), np.bool_)
    for chunk in chunks:
        if chunk.n > SHORT_CHUNK:
            is_single[chunk.first : chunk.first + chunk.n] = False
    tokens = np.flatnonzero(is_single)
    lens = positions[tokens] + 1
    return Singles(
        count=len(tokens),
        max_len=int(lens.max(initial=0)),
        tokens=put(tokens.astype(np.int32)),
        rows=put(token_rows[tokens].astype(np.int32)),
        lens=put(lens.astype(np.int32)),
        tables=tables,
    )


def _logit_rows(plan: StepPlan, chunks: list[Chunk], spans: tuple[PromptSpan, ...]) -> NDArray[np.int64]:
    ends = (chunk.first + chunk.n for chunk in chunks)
    drawn = [i for end, row in zip(ends, plan.prefills, strict=True) for i in range(end - row.num_samples, end)]
    scored = (np.arange(span.first, span.first + len(span.targets)) for span in spans)
    return np.concatenate((np.arange(len(plan.decode_seats)), np.array(drawn, np.int64), *scored))


def _seatings(columns: Columns, plan: StepPlan) -> tuple[Seating, ...]:
    return tuple(
        Seating(request.seat, request, columns.tokens[request.seat, : columns.known[request.seat]].copy())
        for request in plan.seated
        if request.seat is not None
    )
