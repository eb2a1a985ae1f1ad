"""Requests run by a prefill and a decode worker: what each is asked for, and when one worker is the better choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.route.policy import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.route.account import WorkerLoad

ROOM_BITS = 63
"""Rooms are drawn at random, as large as servers keep them: signed integers of 64 bits."""


def prefill_ask(ask: Ask, room: int) -> Ask:
    """What `ask` means for the prefill worker of a pair that meets in `room`: it computes the prompt and no output."""
    return Ask(ask.prompt, 0, ask.keys, ask.session, room)


def mean_tokens(workers: Sequence[WorkerLoad]) -> float:
    """Tokens believed to be on a live rank of `workers`, which are not empty, on average."""
    return sum(worker.tokens for worker in workers) / sum(worker.num_live for worker in workers)


def one_worker_is_better(mixed: float, prefill: float, decode: float) -> bool:
    """Whether a request goes to a worker that does both, by the mean tokens of the ranks of each role: a pair is as
    busy as the busier of its roles."""
    return mixed < max(prefill, decode)
