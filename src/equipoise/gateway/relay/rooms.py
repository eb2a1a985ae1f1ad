"""Where the two legs of a pair meet: rooms at a prefill worker's bootstrap server, as SGLang's servers read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.errors import InvalidValueError
from equipoise.route.pairs import ROOM_BITS

if TYPE_CHECKING:
    from random import Random

    from equipoise.gateway.fleet.worker import Worker

MAX_BATCH = 4096
"""Prompts of one request to a pair: each takes a room, and both legs name them all."""
_STARTS_PROMPT = b'["'
_list = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Rooms:
    """Draws rooms that nobody is in.

    A prefill worker refuses a room that it has seen, so `random` must differ from one gateway to the next, and from
    one life of a gateway to the next: a seed is for tests."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._taken: set[int] = set()

    @property
    def num_taken(self) -> int:
        """Rooms of tries under way."""
        return len(self._taken)

    def take(self, num_rooms: int) -> list[int]:
        """So many rooms, until `give_back`."""
        rooms: list[int] = []
        while len(rooms) < num_rooms:
            room = self._random.getrandbits(ROOM_BITS)
            if room not in self._taken:
                self._taken.add(room)
                rooms.append(room)
        return rooms

    def give_back(self, rooms: list[int]) -> None:
        """The try that took `rooms` is over."""
        self._taken.difference_update(rooms)


def batch_size(prompt: bytes | memoryview) -> int | None:
    """The number of prompts in `prompt`, a list of texts or of lists of ids, as JSON; None where it is one prompt.

    Lists of messages or of ids are one. Raises InvalidValueError when there are over MAX_BATCH."""
    if not prompt or prompt[0] != 0x5B:
        return None
    first = bytes(prompt[1:64]).lstrip()[:1]
    if not first or first not in _STARTS_PROMPT:
        return None
    num_prompts = len(_list.decode(prompt))
    if num_prompts > MAX_BATCH:
        raise InvalidValueError(f"{num_prompts} prompts are too many for one request, at most {MAX_BATCH} are allowed")
    return num_prompts


def bootstrap_fields(prefill: Worker, rooms: list[int], *, is_batch: bool) -> bytes:
    """The fields of a body that name the room of each of its prompts, in lists where it is a batch."""
    host = _encode(f"[{prefill.bootstrap_host}]" if ":" in prefill.bootstrap_host else prefill.bootstrap_host)
    # where no port is known the decode worker takes the one that it was started with
    port = b"null" if prefill.bootstrap_port is None else b"%d" % prefill.bootstrap_port
    if not is_batch:
        return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%d' % (host, port, rooms[0])
    hosts, ports = (b",".join([value] * len(rooms)) for value in (host, port))
    numbers = b",".join(b"%d" % room for room in rooms)
    return b'"bootstrap_host":[%b],"bootstrap_port":[%b],"bootstrap_room":[%b]' % (hosts, ports, numbers)
