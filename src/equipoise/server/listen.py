"""The listening socket. It is bound before a model is loaded, and listens once there is something to say."""

from __future__ import annotations

import socket

from equipoise.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` and `port` (0: a free one), not listening yet. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not an address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: cannot listen on {host}:{port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def listen(listener: socket.socket, backlog: int) -> None:
    """Begin to take connections. Raises ConfigError when someone else began to listen after `bind`."""
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        listener.close()
        raise ConfigError(f"port: cannot listen on {host}:{port}: {error.strerror}") from None
