"""Workers, ranks and models as the gateway's own routes show them: plain values, ready for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import UnknownModelError
from equipoise.gateway.fleet.fleet import listed

if TYPE_CHECKING:
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.route.account import RankAccount


def worker_view(worker: Worker, fleet: Fleet, now: float) -> dict[str, Any]:
    """Everything about one worker. Times are seconds, loads are tokens."""
    load, breaker = worker.load, worker.breaker
    return {
        "id": worker.url.removeprefix("http://"),
        "url": worker.url,
        "kind": worker.kind or "unknown",
        "version": worker.version,
        "role": worker.role,
        "models": list(worker.models),
        "state": worker.state,
        "takes_requests": fleet.is_eligible(worker, now),
        "why_not": fleet.why_not(worker, now),
        "last_error": worker.error,
        "is_healthy": worker.health.is_healthy,
        "num_inflight": worker.num_inflight,
        "weight": load.weight,
        "age_s": round(now - worker.added_at, 3),
        "bootstrap_port": worker.bootstrap_port,
        "breaker": {"state": breaker.state, "num_opened": breaker.num_opened},
        "ejected_for_s": round(max(0.0, worker.record.ejected_until - now), 3),
        "feed": worker.feed,
        "feed_error": worker.feed_error,
        "feed_ok": load.feed_ok,
        "load": load.load(),
        "ranks": rank_views(worker, now),
    }


def rank_views(worker: Worker, now: float) -> list[dict[str, Any]]:
    """The ranks of a worker, each as reported and as believed."""
    numbers = zip(worker.rank_labels, worker.load.ranks, strict=True)
    return [_rank_view(number, account, now) for number, account in numbers]


def _rank_view(number: int, account: RankAccount, now: float) -> dict[str, Any]:
    is_told = account.reported_at is not None
    return {
        "dp_rank": number,
        "is_live": account.is_live,
        "believed_tokens": account.load(),
        "reported_tokens": account.reported if is_told else None,
        "report_age_s": round(max(0.0, now - account.reported_at), 3) if account.reported_at is not None else None,
        "charged_tokens": account.active,
        "pending_tokens": account.pending,
        "num_inflight": account.num_active,
        "num_running_reqs": account.num_running if is_told else None,
        "num_waiting_reqs": account.num_waiting if is_told else None,
        "max_total_num_tokens": account.max_total_tokens,
        "gen_throughput": account.gen_throughput,
    }


def merged_models(fleet: Fleet, since: float) -> dict[str, dict[str, Any]]:
    """The entries of /v1/models of all workers that are up, by model, in the order of the workers.

    What the first worker that serves a model says of it stays as it said it; one that its operator named without the
    worker's knowing has the gateway's start, `since` (seconds since 1970), as its time of creation."""
    found: dict[str, dict[str, Any]] = {}
    for worker in fleet.workers:
        if worker.state != "ready":
            continue
        cards = {card["id"]: card for card in map(msgspec.json.decode, worker.cards)}
        for name in worker.models:
            own = {"id": name, "object": "model", "created": int(since), "owned_by": worker.kind or "unknown"}
            found.setdefault(name, cards.get(name, own))
    return found


def model_card(fleet: Fleet, since: float, name: str) -> dict[str, Any]:
    """The entry of one model. Raises UnknownModelError, which names those that there are."""
    found = merged_models(fleet, since)
    if name not in found:
        raise UnknownModelError(f"model: there is no model {name!r} here; models: {listed(list(found))}")
    return found[name]


def is_ready(fleet: Fleet, now: float) -> bool:
    """Whether a request could be served now: by a worker, or by a prefill and a decode worker together."""
    roles = {worker.role for worker in fleet.workers if fleet.is_eligible(worker, now)}
    return "mixed" in roles or {"prefill", "decode"} <= roles


def count_states(fleet: Fleet) -> dict[str, int]:
    """How many workers are in which state; states that no worker is in are left out."""
    counts: dict[str, int] = {}
    for worker in fleet.workers:
        counts[worker.state] = counts.get(worker.state, 0) + 1
    return counts


def loads_page(fleet: Fleet, now: float) -> dict[str, Any]:
    """All ranks of all workers, in the shape of SGLang's /v1/loads with the worker beside the rank."""
    loads = [
        {
            "worker": worker.url,
            "role": worker.role,
            **rank,
            # believed, so that one gateway may stand behind another
            "num_used_tokens": rank["believed_tokens"],
            "num_running_reqs": rank["num_running_reqs"] or 0,
            "num_waiting_reqs": rank["num_waiting_reqs"] or 0,
        }
        for worker in fleet.workers
        for rank in rank_views(worker, now)
    ]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "num_inflight")
    return {
        "dp_rank_count": len(loads),
        "loads": loads,
        "aggregate": {name: sum(load[name] for load in loads) for name in names},
    }
