"""What a client's connection knows of what is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from equipoise.gateway.http.client import ClientConnection, ClientLimits
    from equipoise.gateway.http.request import ClientRequest, Refusal
    from equipoise.gateway.relay.sweep import Sweep


class Served(Protocol):
    """A request that is being answered, as its client's connection knows it."""

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""

    def pause(self) -> None:
        """The client does not keep up: bring no more for now."""

    def resume(self) -> None:
        """It does again."""


class Front(Protocol):
    """What all clients' connections share."""

    sweep: Sweep
    client_limits: ClientLimits
    marked: dict[bytes, bool]
    is_draining: bool

    def serve(self, client: ClientConnection, request: ClientRequest) -> None:
        """Begin to answer `request`: set `client.served`, call `client.answered` when it is done, which may be now."""

    def refuse(self, client: ClientConnection, refusal: Refusal) -> None:
        """Answer what is no acceptable request; `client.answered` follows at once."""

    def opened(self, client: ClientConnection) -> None:
        """A client connected."""

    def closed(self, client: ClientConnection) -> None:
        """It left."""
