"""Any other server with OpenAI's routes: it has models, and neither ranks nor load reports that are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.gateway.fleet.backends.models import list_models
from equipoise.gateway.fleet.worker import Found

if TYPE_CHECKING:
    from equipoise.gateway.fleet.backends.models import Models
    from equipoise.gateway.fleet.backends.reports import Feed
    from equipoise.gateway.fleet.fetch import Site

FEEDS: tuple[Feed, ...] = ()


async def find(site: Site, models: Models | None = None) -> Found:
    """The server's models. Raises FetchError when it does not answer."""
    models = models or await list_models(site)
    return Found("openai", models.names, cards=models.cards)
