"""The pipe between server and rank: ZeroMQ over ipc, msgpack inside.

Each side binds its own inbox and connects to the other's, so that sending never waits for the peer.
Queues have no mark: what is under way is bounded by the requests that were admitted.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import zmq

from equipoise.engine.messages import FromRank, ToRank

if TYPE_CHECKING:
    from pathlib import Path

LINGER_MS = 1000
RECONNECT_MS = 10
MAX_POKES = 4096
MAX_WAIT_S = 3600.0
"""Longest single wait: a time-out may be infinite, a poller's may not."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class LoopChannel(Protocol):
    """What the engine loop needs of the pipe."""

    def receive(self, timeout_s: float | None) -> ToRank | None:
        """The next message; waits at most `timeout_s` (0: not at all, None: for ever) or until poked."""
        ...

    def send(self, message: FromRank) -> None:
        """Queue a message; never waits."""
        ...

    def poke(self) -> None:
        """Let a waiting `receive` return, from any thread."""
        ...


class Addresses(msgspec.Struct, frozen=True):
    """Where each side listens."""

    server: str
    rank: str

    @classmethod
    def within(cls, folder: Path) -> Addresses:
        """Sockets in `folder`, which must be private to this user."""
        return cls(server=f"ipc://{folder}/server", rank=f"ipc://{folder}/rank")


class Channel(Generic[_In, _Out]):
    """One end of the pipe. One thread may receive while another sends; `poke` is for everyone."""

    def __init__(self, inbox: str, outbox: str, incoming: type[_In]) -> None:
        """Raises zmq.ZMQError when `inbox` cannot be bound."""
        self._context = zmq.Context()
        self._in = self._socket(zmq.PULL)
        self._in.bind(inbox)
        self._out = self._socket(zmq.PUSH)
        self._out.connect(outbox)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._in, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        # Left to the garbage collector, the context would wait for ever for sockets that it collects as well.
        self._release = weakref.finalize(
            self, _release, self._context, (self._in, self._out), (self._wake_read, self._wake_write)
        )
        self._release.atexit = False  # threads may still be using them then

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        return socket

    def receive(self, timeout_s: float | None) -> _In | None:
        """See LoopChannel. Raises msgspec.DecodeError on a message that is none."""
        message = self._take()
        if message is not None or timeout_s == 0:
            return message
        wait_ms = None if timeout_s is None else int(min(timeout_s, MAX_WAIT_S) * 1e3) + 1
        events = dict(self._poller.poll(wait_ms))
        if self._wake_read in events:
            os.read(self._wake_read, MAX_POKES)
        return self._take()

    def _take(self) -> _In | None:
        try:
            return self._decoder.decode(self._in.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def watch(self, file: int) -> None:
        """Let a waiting `receive` return when `file`, a descriptor, can be read, too."""
        self._poller.register(file, zmq.POLLIN)

    def send(self, message: _Out) -> None:
        """See LoopChannel."""
        self._out.send(self._encoder.encode(message))

    def poke(self) -> None:
        """See LoopChannel."""
        if self._release.alive:
            with suppress(BlockingIOError):  # thousands of pokes wait already: one is enough
                os.write(self._wake_write, b"!")

    def close(self) -> None:
        """Send what is queued, for at most LINGER_MS, and free the sockets. Idempotent."""
        self._release()


def _release(
    context: zmq.Context[zmq.Socket[bytes]], sockets: tuple[zmq.Socket[bytes], ...], pipe: tuple[int, int]
) -> None:
    for socket in sockets:
        socket.close(linger=LINGER_MS)
    context.term()
    for end in pipe:
        os.close(end)


def server_end(addresses: Addresses) -> Channel[FromRank, ToRank]:
    """The server's end."""
    return Channel(addresses.server, addresses.rank, FromRank)  # type: ignore[arg-type]


def rank_end(addresses: Addresses) -> Channel[ToRank, FromRank]:
    """The rank's end."""
    return Channel(addresses.rank, addresses.server, ToRank)  # type: ignore[arg-type]
