"""Bells: a rank that waits is woken by any other on its host. One datagram socket each, in the group's folder."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Bell:
    """One rank's bell, and the rope to all others'. Rings that nobody waits for are kept until `listen`."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Takes the place of a process of `rank` that is gone."""
        path = folder / str(rank)
        path.unlink(missing_ok=True)
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        """Readable when it was rung."""
        return self._socket.fileno()

    def ring(self, rank: int) -> None:
        """Wake that rank; never waits, and does not mind if nobody is there."""
        with suppress(OSError):  # gone, or its bell rings already
            self._socket.sendto(b"!", str(self._folder / str(rank)))

    def listen(self, timeout_s: float) -> bool:
        """Wait until it is rung, for at most so long, and take all rings. False when it was not."""
        if not self._poll.poll(timeout_s * 1e3):
            return False
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True

    def close(self) -> None:
        """Take it down."""
        self._socket.close()
