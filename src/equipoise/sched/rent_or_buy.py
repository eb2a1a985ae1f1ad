"""When may a group of ranks prefill: our own gate, ski rental over the states that ranks exchange.

A step in which any rank prefills holds up whoever decodes on every rank of a lockstep group, for as long as the rank
with the most prompt tokens needs. So prefills are cheap together and dear one by one. Keeping the door closed costs
as well: seats stay empty while requests wait for them. Both are measured in the same money, seconds of one request:

    rent     each empty seat that a waiting request could have pays the time that it has been kept empty
    price    of admitting up to k requests per rank: those that run pay what the step lasts longer than it would,
             except for what even a perfectly spread prefill would cost

The door opens at the number k at which rent exceeds the price by most, as soon as it does for any k. Whom it lets in
takes their seats' rent along; the others' rent stays. Prices are learned from the steps themselves, and nothing need be
known of the future: rent up to the price and no further costs least on average when seats turn up evenly (as stock is
ordered: F. Harris, How many parts to make at once, 1913), and for one choice at most twice the least however they do
(as skis are rented: A. Karlin et al., Competitive snoopy caching, 1988). What is known of the past ends a wait early:
when no seat has turned up for much longer than usual, company will not come either. See docs/rent-or-buy.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.rules import OPEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.sched.rules import RankState, StepView

MAX_LEVEL = 64
"""Most requests per rank that an opening weighs: bounds what the gate costs itself."""
MEMORY = 0.97
"""Weight that a prefill step keeps in the learned prices with each later one: about 33 count."""
SAME_SIZE_SHARE = 0.01
"""If all prefills are of one size, what a prefill step costs before its first token cannot be told from its tokens:
this small pull towards 0 then decides, and is not felt otherwise."""
NUM_GAPS = 32
"""Gaps between seats that turn up, of which the mean is taken."""
LULL_GAPS = 4.0
LULL_GAPS_PER_RANK = 0.5
"""Mean gaps after which no company is awaited: the more ranks, the rarer is the one that is missing. Plateaus in the
model of docs/rent-or-buy.md: 3 to 6, and 0.5 to 0.75."""


class StepPrices:
    """What prefill adds to a step: seconds that any prefill costs, and seconds per token of the rank with the most.

    Least squares over the steps that prefilled, older ones counting less, against the last step that did not."""

    __slots__ = ("_decode_s", "_num", "_p", "_pp", "_ps", "_s")

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._num = self._p = self._pp = self._s = self._ps = 0.0

    def learn(self, step_s: float, prefill_tokens: int) -> None:
        """A step took `step_s` seconds; `prefill_tokens` of the rank with the most."""
        if not prefill_tokens:
            self._decode_s = step_s
            return
        self._num = self._num * MEMORY + 1
        self._p = self._p * MEMORY + prefill_tokens
        self._pp = self._pp * MEMORY + float(prefill_tokens) ** 2
        self._s = self._s * MEMORY + step_s
        self._ps = self._ps * MEMORY + step_s * prefill_tokens

    def prices(self) -> tuple[float, float]:
        """(seconds per prefill step, seconds per token), neither below 0; 0 until both kinds of steps were seen."""
        if self._decode_s is None or not self._num:
            return 0.0, 0.0
        num, p, pp = self._num, self._p, self._pp
        extra, extra_p = self._s - self._decode_s * num, self._ps - self._decode_s * p
        determinant = num * (1 + SAME_SIZE_SHARE) * pp - p * p
        start_s = (extra * pp - p * extra_p) / determinant
        token_s = (num * (1 + SAME_SIZE_SHARE) * extra_p - p * extra) / determinant
        if token_s < 0:
            start_s, token_s = extra / num, 0.0
        elif start_s < 0:
            start_s, token_s = 0.0, extra_p / pp
        return max(0.0, start_s), max(0.0, token_s)


class Pace:
    """How often an empty seat turns up that a request waits for: in time during which there was such a seat."""

    __slots__ = ("_gap_s", "_num", "_since_s")

    def __init__(self) -> None:
        self._num = 0
        self._gap_s = self._since_s = 0.0

    def pass_by(self, step_s: float, num_new: int) -> None:
        """A step of `step_s` seconds, after which `num_new` more seats are empty."""
        self._since_s += step_s
        if num_new:
            self._num = min(self._num + num_new, NUM_GAPS)
            self._gap_s += (self._since_s / num_new - self._gap_s) * min(1.0, num_new / self._num)
            self._since_s = 0.0

    def is_lull(self, num_ranks: int) -> bool:
        """Has none turned up for so long that none is awaited?"""
        return self._since_s > self._gap_s * (LULL_GAPS + LULL_GAPS_PER_RANK * num_ranks)


class RentOrBuy:
    """A gate on admissions that opens when empty seats have paid for the prefill that fills them.

    Every answer follows from the sequence of exchanged states alone, so that all ranks of a group, shown the same
    states, give the same ones. A request for which there is room waits at most `max_delay_s` for the gate, counted in
    steps' own time, if no other gate is closed. Running prefills are not held back."""

    def __init__(self, max_step_tokens: int, max_delay_s: float = 15.0) -> None:
        """`max_step_tokens`: of one rank's step."""
        self._max_step_tokens = max_step_tokens
        self._max_delay_s = max_delay_s
        self._prices = StepPrices()
        self._pace = Pace()
        self._rents: list[list[float]] = []  # by rank: seconds that its empty seats have waited, longest first

    @property
    def lasts(self) -> bool:
        """No seat was empty at the last call for which a request waited: only times of steps are remembered."""
        return bool(self._rents) and not any(self._rents)

    def __call__(self, view: StepView) -> int:
        ranks = view.ranks
        step_s = max([rank.step_s for rank in ranks])
        if step_s > 0:
            self._prices.learn(step_s, max([rank.step_prefill_tokens for rank in ranks]))
        self._pay_rent(ranks, step_s)
        num_running = sum([rank.num_running for rank in ranks])
        if not num_running or not any(self._rents):
            return OPEN
        return self._level(ranks, num_running)

    def _pay_rent(self, ranks: Sequence[RankState], step_s: float) -> None:
        """Admissions take the rents of the seats that they fill; seats empty now pay for the step that landed."""
        if len(self._rents) != len(ranks):
            self._rents = [[] for _ in ranks]
        num_new = 0
        for number, rank in enumerate(ranks):
            num_empty = min(rank.num_admissible, MAX_LEVEL)
            rents = self._rents[number]
            if num_empty or rents:
                kept = [rent + step_s for rent in rents[rank.num_admitted :][:num_empty]]
                num_new += num_empty - len(kept)
                self._rents[number] = kept + [step_s] * (num_empty - len(kept))
        if any(self._rents):
            self._pace.pass_by(step_s, num_new)

    def _level(self, ranks: Sequence[RankState], num_running: int) -> int:
        """How many requests each rank may admit: the number with the largest gain, 0 when none pays.

        In a lull, and when a seat has waited `max_delay_s`, the best there is at any price."""
        start_s, token_s = self._prices.prices()
        base = max([rank.prefilling_tokens for rank in ranks])
        most = float(base)
        num_base_steps = -(-base // self._max_step_tokens)
        is_late = max([rents[0] for rents in self._rents if rents]) >= self._max_delay_s
        at_any_price = is_late or self._pace.is_lull(len(ranks))
        rent = tokens = 0.0
        best, best_gain = 0, 0.0
        for level in range(1, max(map(len, self._rents)) + 1):
            for rank, rents in zip(ranks, self._rents, strict=True):
                if len(rents) >= level:
                    rent += rents[level - 1]
                    own, before = _tokens(rank, level), _tokens(rank, level - 1)
                    tokens += own - before
                    most = max(most, rank.prefilling_tokens + own)
            num_steps = -(-most // self._max_step_tokens) - num_base_steps
            uneven = max(0.0, most - base - tokens / len(ranks))
            gain = rent - num_running * (start_s * num_steps + token_s * uneven)
            if (gain >= 0 or at_any_price) and (not best or gain > best_gain):
                best, best_gain = level, gain
        return best


def _tokens(rank: RankState, num: int) -> float:
    """What the first `num` requests that `rank` could admit would compute, all but the very first being average."""
    if num < 2:
        return rank.next_tokens * num
    rest = (rank.admissible_tokens - rank.next_tokens) / (rank.num_admissible - 1)
    return rank.next_tokens + (num - 1) * rest
