"""The gateway's side of a simulation: its policies choose, on its accounts, by reports as old as real ones."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

from equipoise.config.worker import WORKER_ROLES
from equipoise.route.account import RankReport, WorkerLoad
from equipoise.route.catalog import rank_policy, worker_policy
from equipoise.route.lengths import Lengths
from equipoise.route.pairs import ROOM_BITS, mean_tokens, one_worker_is_better, prefill_ask
from equipoise.route.policy import Ask
from equipoise.route.prefix import ENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from equipoise.config.worker import WorkerRole
    from equipoise.route.account import Charge
    from equipoise.route.policy import RankPolicy, WorkerPolicy
    from equipoise.sched.ledger import LoadCounters
    from equipoise.sim.fleet import RoleSize
    from equipoise.sim.scenario import RoutingConfig
    from equipoise.sim.workload.request import SimRequest


BYTES_PER_TOKEN = 4
"""Of the prompts whose bytes the gateway would see."""


def prefix_keys_of(body: SimRequest, piece_len: int) -> list[int]:
    """The keys that the gateway would find in the prompt: as many, of prefixes as long."""
    keys = []
    most = min(body.prompt_len, len(body.pieces) * piece_len)
    for number, end_bytes in enumerate(ENDS):
        end = end_bytes // BYTES_PER_TOKEN
        if end > most:
            break
        keys.append(body.pieces[(end - 1) // piece_len] * len(ENDS) + number)
    return keys


class Choice(NamedTuple):
    """Where a request, or one leg of it, goes; `charge` is None when charges are off."""

    worker: int
    rank: int
    charge: Charge | None


class Pair(NamedTuple):
    """Where the legs of a request go that a prefill and a decode worker serve."""

    prefill: Choice
    decode: Choice


class Desk:
    """The workers of one role, the first of which is number `first`, and the policies that choose among them."""

    def __init__(self, first: int, size: RoleSize, worker_policy: WorkerPolicy, rank_policy: RankPolicy) -> None:
        self.loads = [WorkerLoad(f"worker-{first + number}", size.ranks) for number in range(size.workers)]
        self._numbers = {load.name: first + number for number, load in enumerate(self.loads)}
        self._worker_policy = worker_policy
        self._rank_policy = rank_policy
        self._turns = dict.fromkeys(self._numbers.values(), 0)

    @property
    def wants_keys(self) -> bool:
        """Whether the worker policy goes by prefix keys."""
        return self._worker_policy.wants_keys

    def choose(self, ask: Ask, now: float, *, charges: bool) -> Choice:
        """A worker and a rank for `ask`, charged with it if `charges`."""
        load = self.loads[0] if len(self.loads) == 1 else self._worker_policy.choose(ask, self.loads)
        chosen = self._rank_policy.choose(ask, load)
        self._worker_policy.routed(ask, load)
        worker = self._numbers[load.name]
        rank = self._next_rank(worker, len(load.ranks)) if chosen is None else chosen
        charge = load.charge(rank, ask.prompt, ask.output, now) if charges else None
        return Choice(worker, rank, charge)

    def _next_rank(self, worker: int, num_ranks: int) -> int:
        """The engine's own choice: one rank after the other."""
        turn = self._turns[worker]
        self._turns[worker] = (turn + 1) % num_ranks
        return turn


class Front:
    """Chooses worker and rank of every request: one worker, or a pair, as the gateway's `Pairs` does."""

    def __init__(self, config: RoutingConfig, sizes: Mapping[WorkerRole, RoleSize], piece_len: int, seed: int) -> None:
        """Raises ConfigError when there is no policy of a name."""
        self._piece_len = piece_len
        self._charges = config.charges
        self._lengths = Lengths()
        self._rooms = Random(f"rooms {seed}")
        names: dict[WorkerRole, str] = {
            "mixed": config.worker_policy,
            "prefill": config.prefill_policy or config.worker_policy,
            "decode": config.decode_policy or config.worker_policy,
        }
        self._desks: dict[WorkerRole, Desk] = {}
        self.loads: list[WorkerLoad] = []
        for role, size in sizes.items():
            policy, ranks = worker_policy(names[role], seed=seed), rank_policy(config.rank_policy)
            desk = self._desks[role] = Desk(len(self.loads), size, policy, ranks)
            self.loads += desk.loads
        self._wants_keys = any(desk.wants_keys for desk in self._desks.values())

    def choose(self, body: SimRequest, now: float) -> Choice | Pair:
        """Where `body` goes."""
        session = None if body.session is None else str(body.session).encode()
        keys = prefix_keys_of(body, self._piece_len) if self._wants_keys else ()
        room = self._rooms.getrandbits(ROOM_BITS)
        ask = Ask(body.prompt_len, self._lengths.num_output(None, None), keys, session, room)
        if self._needs_one_worker():
            return self._desks["mixed"].choose(ask, now, charges=self._charges)
        prefill = self._desks["prefill"].choose(prefill_ask(ask, room), now, charges=self._charges)
        return Pair(prefill, self._desks["decode"].choose(ask, now, charges=self._charges))

    def over(self, choice: Choice, num_output: int | None, now: float) -> None:
        """What was sent to `choice` has left it after `num_output` tokens; None: it drew none for the client."""
        if choice.charge is not None:
            choice.charge.end(now, num_output)

    def learn(self, prompt_len: int, num_output: int) -> None:
        """A request has ended after `num_output` tokens."""
        self._lengths.learn(None, prompt_len, prompt_len, num_output)

    def report(self, worker: int, rank: int, load: LoadCounters, taken_at: float) -> None:
        """What a rank said of itself at `taken_at`."""
        num_tokens = load.num_used_tokens + load.num_waiting_tokens
        report = RankReport(rank, num_tokens, load.num_running, load.num_waiting, load.num_total_tokens, None, taken_at)
        account = self.loads[worker]
        account.report((report,))
        account.feed_ok = True

    def _needs_one_worker(self) -> bool:
        desks = self._desks
        if len(desks) < len(WORKER_ROLES):
            return "mixed" in desks
        return one_worker_is_better(*(mean_tokens(desks[role].loads) for role in WORKER_ROLES))
