"""Both ends of the pipe, over real sockets."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from equipoise.engine.channel import Addresses, rank_end, server_end
from equipoise.engine.messages import Abort, Call, Reply, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def addresses() -> Iterator[Addresses]:
    with tempfile.TemporaryDirectory(prefix="eq-") as folder:
        yield Addresses.within(Path(folder))


def test_messages_arrive_in_order_both_ways(addresses: Addresses) -> None:
    server = server_end(addresses)
    server.send(Abort([1, 2]))  # before there is a peer
    server.send(Stop())
    rank = rank_end(addresses)
    assert rank.receive(5) == Abort([1, 2])
    assert rank.receive(5) == Stop()
    rank.send(Reply(3, {"a": 1}))
    rank.close()  # what is queued still arrives
    assert server.receive(5) == Reply(3, {"a": 1})
    server.close()
    server.close()


def test_receive_waits_no_longer_than_told(addresses: Addresses) -> None:
    rank = rank_end(addresses)
    start = time.monotonic()
    assert rank.receive(0) is None
    assert rank.receive(0.05) is None
    assert 0.05 <= time.monotonic() - start < 1
    threading.Timer(0.05, rank.poke).start()
    assert rank.receive(float("inf")) is None
    rank.close()


def test_poke_ends_a_wait(addresses: Addresses) -> None:
    rank = rank_end(addresses)
    for _ in range(10_000):
        rank.poke()
    assert rank.receive(None) is None
    threading.Timer(0.05, rank.poke).start()
    while rank.receive(0.01) is not None:
        pytest.fail("nothing was sent")
    assert rank.receive(5) is None
    rank.close()
    rank.poke()


@pytest.mark.timeout(20)
def test_forgotten_channel_does_not_block_the_collector(addresses: Addresses) -> None:
    server = server_end(addresses)
    server.send(Call(1, "ping"))  # nobody takes it
    cycle = [server]
    cycle.append(cycle)  # type: ignore[arg-type]
    start = time.monotonic()
    del server, cycle
    gc.collect()
    assert time.monotonic() - start < 5
