"""Which kind of server a worker is, and what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.gateway.fleet.backends import equipoise, openai, sglang, vllm
from equipoise.gateway.fleet.backends.models import list_models
from equipoise.gateway.fleet.fetch import FetchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from equipoise.config.worker import WorkerKind
    from equipoise.gateway.fleet.backends.models import Models
    from equipoise.gateway.fleet.backends.reports import Feed
    from equipoise.gateway.fleet.fetch import Site
    from equipoise.gateway.fleet.worker import Found, Kind

    Find = Callable[[Site, Models], Awaitable[Found | None]]

FIND: dict[Kind, Find] = {
    "equipoise": equipoise.find,
    "sglang": sglang.find,
    "vllm": vllm.find,
    "openai": openai.find,
}
"""In the order in which they are asked; the last one is what a server is that is nothing else."""

FEEDS: dict[Kind, tuple[Feed, ...]] = {
    "equipoise": equipoise.FEEDS,
    "sglang": sglang.FEEDS,
    "vllm": vllm.FEEDS,
    "openai": openai.FEEDS,
}
"""Where each kind tells its load, the best first."""


async def discover(site: Site, kind: WorkerKind) -> Found:
    """Ask the server at `site` what it is; `kind` is what its operator says, "auto" where he leaves it open.

    Raises FetchError when it does not answer, is not ready yet, or is not of that kind."""
    models = await list_models(site)
    if kind != "auto":
        found = await FIND[kind](site, models)
        if found is None:
            raise FetchError(f"it does not answer like a {kind} server")
        return found
    for each in sorted(FIND, key=lambda name: name != models.owner):  # the one that it names first
        found = await FIND[each](site, models)
        if found is not None:
            return found
    raise FetchError("no kind of server answers like it")
