"""Where a decode worker finds the prefill of its request: rooms, asked for over TCP, one JSON line each way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

TRANSFER_S = 0.002


class RoomError(Exception):
    """A room that cannot be entered, or in which nobody was met."""


@dataclass
class Room:
    """One prefill rank's side of a request."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # the prefill leg
    fetched: asyncio.Event = field(default_factory=asyncio.Event)  # the decode leg took the KV


class Rooms:
    """The registry of a prefill worker: rooms by (rank, number)."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._rooms: dict[tuple[int, int], Room] = {}
        self._entered: set[int] = set()

    async def listen(self, host: str, port: int) -> int:
        """The port of the registry."""
        server = await asyncio.start_server(self._serve, host, port)
        return int(server.sockets[0].getsockname()[1])

    async def prefill(self, rank: int, room: int) -> None:
        """Offer the KV of a prompt until the decode leg took it. Raises RoomError: entered twice, or nobody came."""
        if room in self._entered:
            raise RoomError(f"bootstrap_room {room} was already used")
        self._entered.add(room)
        meeting = self._room(rank, room)
        meeting.arrived.set()
        try:
            await asyncio.wait_for(meeting.fetched.wait(), self.timeout_s)
        except TimeoutError:
            raise RoomError(f"no decode leg came to bootstrap_room {room} within {self.timeout_s:g} s") from None
        finally:
            self._rooms.pop((rank, room), None)

    def _room(self, rank: int, room: int) -> Room:
        return self._rooms.setdefault((rank, room), Room())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            asked = json.loads(await reader.readline())
            meeting = self._room(int(asked["rank"]), int(asked["room"]))
            await meeting.arrived.wait()
            await asyncio.sleep(TRANSFER_S)
            meeting.fetched.set()
            writer.write(b'{"ok": true}\n')
            await writer.drain()
        writer.close()


async def fetch(host: str, port: int, rank: int, room: int, timeout_s: float) -> None:
    """The decode leg: take the KV from the prefill rank. Raises RoomError when nobody brings it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(json.dumps({"rank": rank, "room": room}).encode() + b"\n")
                if not await reader.readline():
                    raise RoomError(f"the prefill worker at {host}:{port} hung up on bootstrap_room {room}")
            finally:
                writer.close()
    except TimeoutError:
        raise RoomError(f"no prefill leg came to bootstrap_room {room} within {timeout_s:g} s") from None
    except OSError as error:
        raise RoomError(f"the prefill worker at {host}:{port} is away: {error}") from None
