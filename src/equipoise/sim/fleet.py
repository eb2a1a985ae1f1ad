"""The workers of a simulation: each rank the engine's own scheduler, in the groups that step together.

Workers are numbered, and their ranks, over all roles: those that serve requests alone first, then the prefill workers,
then the decode workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from equipoise.exec.costs import build_cost
from equipoise.exec.protocol import ExecutorInfo
from equipoise.sched.assemble import build_scheduler
from equipoise.sched.extend import Extension
from equipoise.sched.roles import DECODE, MIXED, PREFILL
from equipoise.sched.shared import GroupGates
from equipoise.sim.content import Content
from equipoise.sim.group import Group, HostCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from equipoise.clock import Clock
    from equipoise.config.worker import WorkerRole
    from equipoise.exec.cost import CostModel
    from equipoise.request import Request
    from equipoise.sched.roles import Role
    from equipoise.sched.rules import RemoteKV
    from equipoise.sched.scheduler import Scheduler
    from equipoise.sim.events import Events
    from equipoise.sim.results import Requests, Steps
    from equipoise.sim.scenario import FleetConfig, RoleConfig, Scenario


class RoleSize(NamedTuple):
    """How many workers of a role there are, and ranks of each."""

    workers: int
    ranks: int

    @property
    def num_ranks(self) -> int:
        """Of all its workers."""
        return self.workers * self.ranks


def sizes_of(fleet: FleetConfig) -> dict[WorkerRole, RoleSize]:
    """The roles that have workers, in the order in which they are numbered."""
    sizes: dict[WorkerRole, RoleSize] = {
        "mixed": RoleSize(fleet.workers, fleet.ranks),
        "prefill": RoleSize(fleet.prefill_workers, fleet.prefill_ranks),
        "decode": RoleSize(fleet.decode_workers, fleet.decode_ranks),
    }
    return {role: size for role, size in sizes.items() if size.workers}


def first_ranks(fleet: FleetConfig) -> list[int]:
    """The number of the first rank of each worker, and that of all ranks as the last."""
    firsts = [0]
    for size in sizes_of(fleet).values():
        for _ in range(size.workers):
            firsts.append(firsts[-1] + size.ranks)
    return firsts


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of the requests that the ranks of a role run: columns, and who ends."""

    requests: Requests
    on_end: Callable[[Request, float], None]


class Seat(NamedTuple):
    """Where a rank is: the group that it steps with, its place there, and its number among all ranks."""

    group: Group
    place: int
    number: int


class Part:
    """What the ranks of one role have in common."""

    def __init__(self, role: Role, config: RoleConfig, fleet: FleetConfig, piece_len: int, folder: Path) -> None:
        """Raises ConfigError when a file that the cost model needs is missing or broken."""
        cache = config.cache
        self.cost: CostModel = build_cost(config.cost, folder)
        self.content = Content(cache.page_size, piece_len, fleet.max_model_len, prefix_cache=cache.prefix_cache)
        self.host = HostCost(config.host.step_us / 1e6, config.host.row_us / 1e6)
        self._role = role
        self._config = config
        self._max_model_len = fleet.max_model_len

    def schedulers(self, num_ranks: int, clock: Clock, remote: RemoteKV | None) -> list[Scheduler]:
        """Those of a group of ranks."""
        cache = self._config.cache
        assert cache.num_pages is not None
        info = ExecutorInfo(
            model_type="sim",
            vocab_size=1,
            max_model_len=self._max_model_len,
            page_size=cache.page_size,
            num_pages=cache.num_pages,
            eos_ids=(),
            device="sim",
            dtype="none",
        )
        extension = None if remote is None else Extension(remote=remote)
        gates = GroupGates()
        return [
            build_scheduler(self._config.scheduler, cache, info, clock, extension, self._role, gates)
            for _ in range(num_ranks)
        ]


class Fleet:
    """Every worker. `remote`: what brings KV to decode ranks."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        piece_len: int,
        clock: Clock,
        events: Events,
        steps: Steps,
        observers: Mapping[WorkerRole, Observers],
        remote: RemoteKV,
        *,
        leaps: bool,
    ) -> None:
        """Raises ConfigError when a file or a rule that the scenario names is missing or broken."""
        fleet, shared = scenario.fleet, scenario.shared()
        self.sizes = sizes_of(fleet)
        configs = {
            "mixed": (MIXED, shared),
            "prefill": (PREFILL, scenario.prefill or shared),
            "decode": (DECODE, scenario.decode or shared),
        }
        self.parts: dict[WorkerRole, Part] = {
            role: Part(*configs[role], fleet, piece_len, folder) for role in self.sizes
        }

        def group(role: WorkerRole, number: int, num_ranks: int) -> Group:
            part, told = self.parts[role], observers[role]
            ranks = part.schedulers(num_ranks, clock, remote if role == "decode" else None)
            return Group(number, ranks, part.cost, part.host, events, told.requests, steps, told.on_end, leaps=leaps)

        self._seats: list[list[Seat]] = []
        number = 0
        for role, size in self.sizes.items():
            for _ in range(size.workers):
                group_size = size.ranks if fleet.lockstep else 1
                self._seats.append(_seats(number, size.ranks, group_size, partial(group, role)))
                number += size.ranks

    @property
    def cost_source(self) -> str:
        """Where the costs of steps come from."""
        return "; ".join(dict.fromkeys(part.cost.source for part in self.parts.values()))

    @property
    def num_ranks(self) -> int:
        """Of all workers."""
        return sum(size.num_ranks for size in self.sizes.values())

    def seat(self, worker: int, rank: int) -> Seat:
        """Where rank `rank` of worker `worker` is."""
        return self._seats[worker][rank]

    def schedulers(self) -> Iterator[Scheduler]:
        """That of every rank, worker after worker."""
        return (seat.group.ranks[seat.place] for seats in self._seats for seat in seats)


def _seats(number: int, num_ranks: int, group_size: int, make_group: Callable[[int, int], Group]) -> list[Seat]:
    """Of a worker whose first rank is `number`; `make_group(number, num_ranks)` makes some that step together."""
    seats: list[Seat] = []
    for first in range(number, number + num_ranks, group_size):
        group = make_group(first, group_size)
        seats += [Seat(group, place, first + place) for place in range(group_size)]
    return seats
