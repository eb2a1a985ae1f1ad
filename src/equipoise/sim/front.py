"""The gateway's side of a simulation: its policies choose, on its accounts, by reports as old as real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from equipoise.route.account import RankReport, WorkerLoad
from equipoise.route.catalog import rank_policy, worker_policy
from equipoise.route.lengths import Lengths
from equipoise.route.policy import Ask
from equipoise.route.prefix import ENDS

if TYPE_CHECKING:
    from equipoise.route.account import Charge
    from equipoise.sched.ledger import LoadCounters
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
    """Where a request goes; `charge` is None when charges are off."""

    worker: int
    rank: int
    charge: Charge | None


class Front:
    """Chooses worker and rank of every request."""

    def __init__(self, config: RoutingConfig, num_workers: int, num_ranks: int, piece_len: int, seed: int) -> None:
        """Raises ConfigError when there is no policy of a name."""
        self._piece_len = piece_len
        self.loads = [WorkerLoad(f"worker-{number}", num_ranks) for number in range(num_workers)]
        self._numbers = {load.name: number for number, load in enumerate(self.loads)}
        self._worker_policy = worker_policy(config.worker_policy, seed=seed)
        self._rank_policy = rank_policy(config.rank_policy)
        self._charges = config.charges
        self._lengths = Lengths()
        self._turns = [0] * num_workers

    def choose(self, body: SimRequest, room: int, now: float) -> Choice:
        """Where `body` goes. `room`: its number, as of a P/D pair's room."""
        session = None if body.session is None else str(body.session).encode()
        keys = prefix_keys_of(body, self._piece_len) if self._worker_policy.wants_keys else ()
        ask = Ask(body.prompt_len, self._lengths.num_output(None, None), keys, session, room)
        load = self.loads[0] if len(self.loads) == 1 else self._worker_policy.choose(ask, self.loads)
        self._worker_policy.routed(ask, load)
        worker = self._numbers[load.name]
        chosen = self._rank_policy.choose(ask, load)
        rank = self._next_rank(worker) if chosen is None else chosen
        charge = load.charge(rank, ask.prompt, ask.output, now) if self._charges else None
        return Choice(worker, rank, charge)

    def ended(self, choice: Choice, prompt_len: int, num_output: int, now: float) -> None:
        """A request that was sent to `choice` has drawn `num_output` tokens and left."""
        self._lengths.learn(None, prompt_len, prompt_len, num_output)
        if choice.charge is not None:
            choice.charge.end(now, num_output)

    def report(self, worker: int, rank: int, load: LoadCounters, taken_at: float) -> None:
        """What a rank said of itself at `taken_at`."""
        num_tokens = load.num_used_tokens + load.num_waiting_tokens
        report = RankReport(rank, num_tokens, load.num_running, load.num_waiting, load.num_total_tokens, None, taken_at)
        account = self.loads[worker]
        account.report((report,))
        account.feed_ok = True

    def _next_rank(self, worker: int) -> int:
        """The engine's own choice: one rank after the other."""
        turn = self._turns[worker]
        self._turns[worker] = (turn + 1) % len(self.loads[worker].ranks)
        return turn
