"""Rank policies: which data-parallel rank of a worker serves a request. Dead and stale ranks are skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.route.account import RankAccount, WorkerLoad
    from equipoise.route.policy import Ask


class MinimumTokens:
    """The rank with the fewest tokens believed to be there (sgl-project/sglang#20435). Ties rotate."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        ranks = worker.ranks
        if len(ranks) == 1:
            return None
        turn = worker.turn
        best: RankAccount | None = None
        for account in ranks[turn:] + ranks[:turn]:
            if account.is_live and (best is None or account.tokens < best.tokens):
                best = account
        if best is None:
            return None
        worker.turn = (best.rank + 1) % len(ranks)
        return best.rank


class RoundRobin:
    """One live rank after the other."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        rank = next_live(worker, worker.turn)
        if rank is not None:
            worker.turn = (rank + 1) % len(worker.ranks)
        return rank


class FollowRoom:
    """Rank `room % ranks`, where a P/D pair's other leg looks for it; the next live one when that is dead. The
    engine's own choice for a request without a room."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        return None if ask.room is None else next_live(worker, ask.room % len(worker.ranks))


class EngineChoice:
    """Never a rank: the engine chooses."""

    def choose(self, ask: Ask, worker: WorkerLoad) -> int | None:
        return None


def next_live(worker: WorkerLoad, first: int) -> int | None:
    """The first live rank from `first` on, around the end. None: none is live, or there is nothing to choose."""
    ranks = worker.ranks
    if len(ranks) == 1:
        return None
    return next((account.rank for account in ranks[first:] + ranks[:first] if account.is_live), None)
