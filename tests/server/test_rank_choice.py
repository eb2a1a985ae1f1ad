"""What is believed of ranks, told message by message."""

from __future__ import annotations

import pytest

from equipoise.engine.messages import RankLoad
from equipoise.errors import ConfigError, QueueFullError, UnavailableError
from equipoise.server.rank_choice import RankChoice


def load(dp_rank: int, tokens: int) -> RankLoad:
    return RankLoad(dp_rank, 0.0, 1, 0, 0, tokens, tokens, 1000, 8, tokens / 1000, 0.0, 0.0)


class Told:
    """A rank as a choice sees it, told what to say."""

    def __init__(self, choice: RankChoice, dp_rank: int) -> None:
        self.books = choice.books(dp_rank, 0.0)
        self.load = load(dp_rank, 0)
        self.loss: str | None = None
        self.is_full = False

    def refusal(self, num_prompt: int) -> QueueFullError | None:
        return QueueFullError(f"no room for {num_prompt}") if self.is_full else None

    def hear(self, tokens: int, num_added: int, now: float) -> None:
        """A message came."""
        self.load = load(self.books.account.rank, tokens)
        self.books.hear(num_added, now)
        self.books.reconcile(self.load)

    @property
    def believed(self) -> int:
        return self.books.account.tokens


def ranks_of(num_ranks: int, policy: str = "minimum_tokens") -> tuple[RankChoice, list[Told]]:
    choice = RankChoice(policy, num_ranks)
    return choice, [Told(choice, dp_rank) for dp_rank in range(num_ranks)]


def test_a_load_includes_what_the_rank_had_received_and_nothing_else() -> None:
    _, [rank, _] = ranks_of(2)
    rank.books.charge(100, 10, 1.0)
    rank.books.charge(200, 20, 1.001)
    assert rank.believed == 330
    rank.hear(105, 1, 9.0)  # a long step: the second request came in meanwhile, and this load lacks it
    assert rank.believed == 105 + 220
    rank.hear(315, 2, 9.001)
    assert rank.believed == 315


def test_who_ends_with_a_message_is_not_in_its_load() -> None:
    _, [rank, _] = ranks_of(2)
    first = rank.books.charge(100, 10, 1.0)
    rank.hear(110, 1, 1.01)
    rank.books.charge(50, 5, 2.0)
    rank.load = load(0, 0)
    rank.books.hear(1, 2.5)  # the first ended in this step, the second is on its way
    first.end(rank.books.taken_at, 10)
    rank.books.reconcile(rank.load)
    assert rank.believed == 55
    rank.hear(52, 2, 2.6)
    assert rank.believed == 52


def test_an_idle_rank_is_charged_from_nothing() -> None:
    _, [rank, _] = ranks_of(2)
    charge = rank.books.charge(1000, 10, 1.0)
    rank.books.hear(1, 1.5)
    charge.end(rank.books.taken_at, 10)
    rank.books.reconcile(load(0, 0))
    assert rank.believed == 0
    rank.books.charge(7, 3, 60.0)
    assert rank.believed == 10


def test_the_same_load_counts_once() -> None:
    _, [rank, _] = ranks_of(2)
    rank.hear(80, 0, 1.0)
    rank.books.charge(5, 0, 1.1)
    for _ in range(3):
        rank.books.reconcile(rank.load)
    assert rank.believed == 85


def test_a_burst_spreads_by_tokens() -> None:
    choice, ranks = ranks_of(3)
    sizes = [0, 0, 0]
    for number, size in enumerate([900, 100, 100, 100, 700, 600]):
        chosen = choice.choose(ranks, size, 0)
        chosen.books.charge(size, 0, float(number))
        sizes[ranks.index(chosen)] += size
    assert sorted(sizes) == [800, 800, 900]


def test_a_full_rank_is_passed_over_until_all_are() -> None:
    choice, ranks = ranks_of(3, "round_robin")
    ranks[0].is_full = ranks[1].is_full = True
    assert [choice.choose(ranks, 1, 1) for _ in range(4)] == [ranks[2]] * 4
    ranks[2].is_full = True
    with pytest.raises(QueueFullError, match="no room for 1"):
        choice.choose(ranks, 1, 1)


def test_only_usable_ranks_are_chosen_and_a_silent_one_at_last() -> None:
    choice, ranks = ranks_of(3, "none")
    ranks[1].books.account.is_dead = True
    assert {ranks.index(choice.choose(ranks, 1, 1)) for _ in range(6)} == {0, 2}
    for rank in ranks:
        rank.books.account.is_dead = True
    ranks[0].loss = "gone"
    assert choice.choose(ranks, 1, 1) is ranks[1]
    for rank in ranks:
        rank.loss = "gone"
    with pytest.raises(UnavailableError, match="every rank is gone"):
        choice.choose(ranks, 1, 1)


def test_outputs_are_expected_as_long_as_they_lately_were() -> None:
    choice, _ = ranks_of(2)
    assert choice.expected_output(5) == 5
    for _ in range(400):
        choice.learn(40)
    assert 39 <= choice.expected_output(10_000) <= 41


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank policy: 'fewest' is not known, allowed are minimum_tokens"):
        RankChoice("fewest", 2)
