"""The shapes a scheduling feature can have. A feature is one of these, and one line in `assemble`.

Limit     how many tokens of a request run now        bound once a step, asked per chunk
Gate      may this step prefill, how many may enter   asked once a step
Resource  has a countable thing room                  asked at admission
Order     who is next, who is preempted               asked when a request is queued
Place     can it run at all                           a name; moved at events (see `scheduler`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.drafts import Drafter
    from equipoise.sched.plan import StepPlan

OPEN = 1 << 30
"""What a gate answers when it sets no bound."""


@dataclass(slots=True)
class RankState:
    """What ranks tell each other every step; plain numbers, so that a state packs into a vector. Not frozen, as
    StepView: made anew every step, and freezing triples the price (1.0 us to 0.4 us). Nobody changes one.

    num_admitted: requests that the last plan admitted
    num_admissible: of those that wait, how many have a seat and pages, taking them for average
    next_tokens, admissible_tokens: what the first of them would compute, and all of them, taking the rest for average;
        less what is known to be cached
    prefilling_tokens: what running prefills have yet to compute
    prefill_tokens: what the next step would compute of both, were all gates open; at most what a step holds
    step_s, step_prefill_tokens: seconds and prompt tokens of the step that landed since the last plan, 0 when none"""

    num_running: int
    num_waiting: int
    wants_prefill: bool = False
    num_admitted: int = 0
    num_admissible: int = 0
    next_tokens: int = 0
    admissible_tokens: int = 0
    prefilling_tokens: int = 0
    prefill_tokens: int = 0
    step_s: float = 0.0
    step_prefill_tokens: int = 0


@dataclass(slots=True)
class StepView:
    """What rules may look at when a step is planned.

    `num_running` holds a seat (decoding, prefilling or draining). `num_steps_since_prefill`: 1 right after a step
    that computed a prompt, more than its last token. `has_backlog`: the last step that could admit left requests
    waiting. `ranks` has one entry per rank of the group, this one included."""

    step: int
    now_s: float
    num_running: int
    num_decoding: int
    num_prefilling: int
    num_waiting: int
    num_free_seats: int
    num_steps_since_prefill: int
    has_backlog: bool
    ranks: tuple[RankState, ...]


Limit = Callable[["Request", int], int]
"""`limit(request, n) -> m`, pure, 0 <= m <= n: of the `n` tokens after `request.num_computed`, `m` may run."""

LimitRule = Callable[[StepView], Limit | None]
"""Bind a limit for one step; None when it is void in this step."""

Gate = Callable[[StepView], int]
"""0 or less closed, `OPEN` no bound, else how many requests may enter."""


@runtime_checkable
class LastingGate(Protocol):
    """A gate that knows how long its answer lasts: on virtual time nobody asks it meanwhile."""

    @property
    def lasts(self) -> bool:
        """The last answer stands, and asking again would change nothing that is remembered beside the times of steps,
        until a request moves on any rank of the group."""
        ...

    def __call__(self, view: StepView) -> int:
        """As every `Gate`."""
        ...


class Lasting:
    """A gate that remembers nothing of its own, and whose answers last until a request moves on any rank: all of them,
    since they depend on numbers of requests alone, or those for which `when(view, answer)` holds."""

    def __init__(self, gate: Gate, when: Callable[[StepView, int], bool] | None = None) -> None:
        self.__qualname__ = rule_name(gate)
        self._gate = gate
        self._when = when
        self.lasts = when is None

    def __call__(self, view: StepView) -> int:
        answer = self._gate(view)
        if self._when is not None:
            self.lasts = self._when(view, answer)
        return answer


Observer = Callable[["StepPlan", StepView, str], None]
"""`observer(plan, view, held_by)`: a step was planned; `held_by` is "" when the queue was drained."""

Order = Callable[["Request"], tuple[float, ...]]
"""Sort key: the smallest goes first, the largest is preempted. The scheduler appends the handle."""


Outranks = Callable[["Request", "Request"], bool]
"""`outranks(waiting, running)`: may the first, which lacks a seat or pages, preempt the second?"""

VictimOrder = Callable[["Request", int], tuple[float, ...]]
"""`victim_order(request, num_computed)`: of the running, the one with the largest is preempted when pages lack."""


class Resource(Protocol):
    """A countable thing that admitted requests hold. A request for which it has no room is blocked, and others
    pass it."""

    @property
    def name(self) -> str:
        """What explanations call it."""
        ...

    def check(self, request: Request) -> None:
        """A new request: raise InvalidValueError, naming the field, if there could never be room for it."""
        ...

    def begin_step(self) -> bool:
        """A new step is planned. True when something that did not fit before may fit now."""
        ...

    def share(self, request: Request) -> str:
        """Requests with equal shares fit, or do not fit, alike."""
        ...

    def fit(self, request: Request, n: int) -> bool:
        """Is there room for `request`, entering with a chunk of `n` tokens?"""
        ...

    def take(self, request: Request, n: int) -> None:
        """A chunk of `n` tokens of `request` is planned, its first or a later one."""
        ...

    def give_back(self, request: Request) -> None:
        """`request`, for which something was taken, leaves its seat: it was preempted or ended."""
        ...


class RemoteKV(Protocol):
    """A store that may hold the KV of a prompt's beginning, and brings it while others run."""

    def num_tokens(self, request: Request) -> int:
        """Tokens [0, n) of the prompt that it can bring; asked when the request is about to be admitted."""
        ...

    def start(self, request: Request, first: int, upto: int) -> None:
        """Begin to write the KV of tokens [first, upto) into `request.pages`, after every step submitted before: one
        of them may still write what the pages held. `Scheduler.kv_arrived` is told when nothing is written any more,
        be it that all came or that it failed."""
        ...


@dataclass(frozen=True)
class Rules:
    """Every optional feature of a scheduler, by shape. A disabled feature is not in here.

    observers: told of every plan, before it is counted as run, and of what held the head of the queue back."""

    order: Order
    victim_order: VictimOrder
    outranks: Outranks | None = None
    limits: Sequence[LimitRule] = ()
    prefill_gates: Sequence[Gate] = ()
    admission_gates: Sequence[Gate] = ()
    resources: Sequence[Resource] = ()
    drafter: Drafter | None = None
    remote: RemoteKV | None = None
    observers: Sequence[Observer] = ()


def rule_name(rule: object) -> str:
    """What explanations call a rule: its class, or the factory that made it."""
    return str(getattr(rule, "__qualname__", type(rule).__name__)).partition(".")[0]
