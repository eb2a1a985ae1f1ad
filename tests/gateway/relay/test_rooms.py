"""Rooms: fresh, unlike each other, named as servers read them."""

from __future__ import annotations

import json
from random import Random

import pytest
from tests.gateway.pure_fleet import empty_fleet

from equipoise.config.worker import WorkerSpec
from equipoise.errors import InvalidValueError
from equipoise.gateway.relay.rooms import Rooms, batch_size, bootstrap_fields


class Repeating(Random):
    """Draws each number twice."""

    num_drawn = 0

    def getrandbits(self, k: int, /) -> int:
        self.num_drawn += 1
        return self.num_drawn // 2


def test_rooms_are_drawn_by_a_seed_from_63_bits() -> None:
    drawn = [Rooms(Random(seed)).take(1000) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0 <= room < 2**63 for room in drawn[0])
    assert max(drawn[0]) > 2**62


def test_nobody_is_led_to_a_room_that_is_taken() -> None:
    rooms = Rooms(Repeating())
    first = rooms.take(3)
    assert len(set(first)) == rooms.num_taken == 3
    assert not set(first) & set(rooms.take(2))
    rooms.give_back(first)
    assert rooms.num_taken == 2


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        (b'["a", "b]"]', 2),
        (b'[ "a" ]', 1),
        (b"[[1,2], [3], []]", 3),
        (b"[1, 2]", None),
        (b'[{"role": "user"}]', None),
        (b'"a"', None),
        (b"[]", None),
        (b"", None),
        (b'[\n\t "a"]', 1),
    ],
)
def test_batches_are_told_from_prompts(prompt: bytes, size: int | None) -> None:
    assert batch_size(prompt) == batch_size(memoryview(prompt)) == size


def test_a_batch_has_a_bound() -> None:
    assert batch_size(b'["a"%b]' % (b',"a"' * 4095)) == 4096
    with pytest.raises(InvalidValueError, match="4097 prompts are too many for one request, at most 4096"):
        batch_size(b'["a"%b]' % (b',"a"' * 4096))


@pytest.mark.parametrize(
    ("url", "host"), [("http://p:1", "p"), ("http://10.0.0.1:1", "10.0.0.1"), ("[::1]:1", "[::1]")]
)
@pytest.mark.parametrize("port", [None, 8998])
def test_fields_name_host_port_and_room(url: str, host: str, port: int | None) -> None:
    worker = empty_fleet().add(WorkerSpec(url, "prefill", bootstrap_port=port), 0.0)
    one = json.loads(b"{%b}" % bootstrap_fields(worker, [7], is_batch=False))
    assert one == {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 7}
    many = json.loads(b"{%b}" % bootstrap_fields(worker, [7, 8], is_batch=True))
    assert many == {"bootstrap_host": [host] * 2, "bootstrap_port": [port] * 2, "bootstrap_room": [7, 8]}
