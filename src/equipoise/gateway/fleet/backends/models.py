"""What every kind of server has: /v1/models, and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from equipoise.gateway.fleet.fetch import FetchError

if TYPE_CHECKING:
    from equipoise.gateway.fleet.fetch import Site


MAX_RANKS = 4096
"""Of one worker; more are too many to be true, and each takes memory and time."""


class _Card(msgspec.Struct):
    id: str
    owned_by: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[msgspec.Raw]


_decode_cards = msgspec.json.Decoder(_Cards).decode
_decode_card = msgspec.json.Decoder(_Card).decode


@dataclass(frozen=True, slots=True)
class Models:
    """names: base models first, then adapters. cards: their entries as JSON, in the same order. owner: what the first
    entry says in `owned_by`, in lower case."""

    names: tuple[str, ...] = ()
    cards: tuple[bytes, ...] = ()
    owner: str = ""


async def list_models(site: Site) -> Models:
    """The models that a server lists; none where it has no /v1/models. Raises FetchError when it does not answer or
    answers nonsense."""
    answer = await site.get("/v1/models")
    if answer.status in (404, 405, 501):
        return Models()
    if not answer.is_ok:
        raise FetchError(f"/v1/models answered {answer.status}")
    try:
        raw = [bytes(card) for card in _decode_cards(answer.body).data]
        cards = [(_decode_card(card), card) for card in raw]
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FetchError(f"/v1/models: {error}") from None
    cards.sort(key=lambda pair: pair[0].parent is not None)
    owner = (cards[0][0].owned_by or "").lower() if cards else ""
    return Models(tuple(card.id for card, _ in cards), tuple(raw for _, raw in cards), owner)


def check_num_ranks(num_ranks: int) -> None:
    """Raises FetchError when a server says that it has more ranks than one can have."""
    if num_ranks > MAX_RANKS:
        raise FetchError(f"{num_ranks} ranks are too many to be true, at most {MAX_RANKS} are routed to")
