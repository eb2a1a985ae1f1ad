"""Which rank a request goes to: believed loads, kept exact by what the ranks echo, and a policy over them.

The server is the only one that sends its ranks requests, over a pipe that keeps their order, and every message of a
rank says how many requests it had received by then. So a load says exactly which charges it includes, however
long a step lasts: its time, in terms of `equipoise.route.account`, is just before the first request that it lacks.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeVar

from equipoise.errors import UnavailableError
from equipoise.route.account import REPORT_LAG_S, RankReport, WorkerLoad
from equipoise.route.catalog import rank_policy
from equipoise.route.lengths import ModelLengths
from equipoise.route.policy import Ask
from equipoise.route.ranks import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.engine.messages import RankLoad
    from equipoise.errors import QueueFullError
    from equipoise.route.account import Charge, RankAccount

JUST_S = 1e-6
"""What "just before" means: less than the time between two requests."""


class RankBooks:
    """The believed load of one rank process. Times are monotonic seconds.

    taken_at: the time that the rank's latest load counts from"""

    def __init__(self, account: RankAccount, now: float) -> None:
        self.account = account
        self.taken_at = now
        self._num_echoed = 0
        self._sent_at: deque[float] = deque()  # of requests that no message includes yet

    def charge(self, prompt: int, output: int, now: float) -> Charge:
        """A request is being sent."""
        self._sent_at.append(now)
        # the account allows for a way to the rank of unknown length; ours is known
        return self.account.charge(prompt, output, now - REPORT_LAG_S)

    def hear(self, num_added: int, now: float) -> None:
        """A message came, which includes the first `num_added` requests."""
        sent_at = self._sent_at
        for _ in range(min(num_added - self._num_echoed, len(sent_at))):
            sent_at.popleft()
        self._num_echoed = num_added
        self.taken_at = max(self.taken_at, sent_at[0] - JUST_S if sent_at else now)

    def reconcile(self, load: RankLoad) -> None:
        """Believe `load`, the latest."""
        account = self.account
        if account.reported_at != self.taken_at:
            account.report(
                RankReport(
                    account.rank,
                    load.num_tokens,
                    load.num_running_reqs,
                    load.num_waiting_reqs,
                    load.max_total_num_tokens,
                    load.gen_throughput,
                    self.taken_at,
                )
            )


class Rank(Protocol):
    """What a choice needs to know of a rank.

    load: the latest. loss: why it is gone. books: what is believed of it, None where nobody chooses"""

    load: RankLoad
    loss: str | None
    books: RankBooks | None

    def refusal(self, num_prompt: int) -> QueueFullError | None:
        """Why it would refuse a prompt of so many tokens, None when it would not."""
        ...


_Rank = TypeVar("_Rank", bound=Rank)


class RankChoice:
    """Chooses ranks by a policy of `equipoise.route`."""

    def __init__(self, policy: str, num_ranks: int) -> None:
        """Raises ConfigError when there is no such policy."""
        self._worker = WorkerLoad("server", num_ranks)
        self._policy = rank_policy(policy)
        self._otherwise = RoundRobin()
        self._lengths = ModelLengths()

    def books(self, dp_rank: int, now: float) -> RankBooks:
        """Books of a rank process that just started."""
        account = self._worker.ranks[dp_rank]
        account.is_dead = False
        return RankBooks(account, now)

    def expected_output(self, max_tokens: int) -> int:
        """Output tokens of a request that may have `max_tokens`: what outputs lately had."""
        return min(max_tokens, int(self._lengths.mean_output))

    def learn(self, num_output: int) -> None:
        """A request ended with so many tokens."""
        self._lengths.learn_output(num_output)

    def choose(self, ranks: Sequence[_Rank], num_prompt: int, num_output: int) -> _Rank:
        """One of `ranks` that has room; one that is silent when no other lives.

        Raises UnavailableError when none lives, QueueFullError when all are full."""
        for rank in ranks:
            if rank.books is not None:
                rank.books.reconcile(rank.load)
        ask = Ask(num_prompt, num_output)
        chosen = self._policy.choose(ask, self._worker)
        if chosen is None:
            chosen = self._otherwise.choose(ask, self._worker)
        if chosen is None:
            return _first_alive(ranks)
        refusal = ranks[chosen].refusal(num_prompt)
        if refusal is None:
            return ranks[chosen]
        for account in sorted(self._worker.ranks, key=lambda account: account.tokens):
            if account.is_live and ranks[account.rank].refusal(num_prompt) is None:
                return ranks[account.rank]
        raise refusal


def _first_alive(ranks: Sequence[_Rank]) -> _Rank:
    for rank in ranks:
        if rank.loss is None:
            return rank
    raise UnavailableError(f"every rank is gone: {ranks[-1].loss}")
