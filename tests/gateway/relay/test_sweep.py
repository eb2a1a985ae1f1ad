"""The periodic pass over what has time limits."""

from __future__ import annotations

import asyncio

from equipoise.gateway.relay.sweep import Sweep


class Looked:
    """Counts its checks; leaves, or brings in another, at its first one."""

    def __init__(self, sweep: Sweep, brings: Looked | None = None) -> None:
        self.sweep = sweep
        self.brings = brings
        self.times: list[float] = []

    def check(self, now: float) -> None:
        self.times.append(now)
        if self.brings is not None:
            self.sweep.add(self.brings, None)
            self.sweep.remove(self)


async def until(looked: Looked, num_checks: int) -> None:
    async with asyncio.timeout(20):
        while len(looked.times) < num_checks:
            await asyncio.sleep(0.005)


def test_everything_is_looked_at_until_it_leaves() -> None:
    async def run() -> None:
        sweep = Sweep(0.01, 0.05)
        stays, slow = Looked(sweep), Looked(sweep)
        brought = Looked(sweep)
        leaves = Looked(sweep, brought)
        sweep.add(stays, None)
        sweep.add(leaves, None)
        sweep.add_slow(slow)
        await until(slow, 3)
        await until(stays, 10)
        assert len(leaves.times) == 1
        assert len(brought.times) >= 1
        assert len(slow.times) < len(stays.times)
        assert stays.times == sorted(stays.times)
        sweep.remove(stays)
        sweep.remove(stays)
        sweep.remove_slow(slow)
        assert sweep.num_running == 1
        num_checks = len(stays.times)
        await until(brought, len(brought.times) + 3)
        assert len(stays.times) == num_checks
        sweep.close()

    asyncio.run(run())
