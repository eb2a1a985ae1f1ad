"""Our own servers: `/server_info` with dp_size and role, `/v1/loads` for load, the rank in X-Data-Parallel-Rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.config.worker import WORKER_ROLES
from equipoise.gateway.fleet.backends.models import check_num_ranks, list_models
from equipoise.gateway.fleet.backends.reports import GET_LOAD, LOADS, count
from equipoise.gateway.fleet.backends.sglang import server_info
from equipoise.gateway.fleet.worker import Found, rank_place

if TYPE_CHECKING:
    from equipoise.gateway.fleet.backends.models import Models
    from equipoise.gateway.fleet.fetch import Site

FEEDS = (LOADS, GET_LOAD)


async def find(site: Site, models: Models | None = None) -> Found | None:
    """What the server says of itself; None when it is none of ours. Raises FetchError when it does not answer."""
    info = await server_info(site)
    if info is None or not ("dp_size" in info and "executor" in info):
        return None
    models = models or await list_models(site)
    num_ranks = count(info["dp_size"]) or 1
    check_num_ranks(num_ranks)
    return Found(
        "equipoise",
        models.names,
        tuple(range(num_ranks)),
        tuple(rank_place(rank) for rank in range(num_ranks)) if num_ranks > 1 else (),
        next((role for role in WORKER_ROLES if role == info.get("role")), None),
        count(info.get("bootstrap_port")),
        str(info.get("version", "")),
        models.cards,
    )
