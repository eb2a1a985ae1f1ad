"""From a request to the worker and rank that serve it: candidates, policy, rank, charge.

    route: model and role -> eligible workers (kept until the fleet changes) -> worker policy -> rank policy -> charge
    finished: the charge ends; breaker and outlier record hear how it went

One worker policy object per model and role, since prefix maps and turns of one model say nothing about another;
one rank policy object per role. Both can be exchanged while requests run: what was routed ends where it began.
Pure: time is passed in.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from equipoise.config.worker import WORKER_ROLES
from equipoise.errors import InvalidValueError, NoWorkerError, UnknownModelError
from equipoise.gateway.fleet.fleet import listed
from equipoise.route.pairs import mean_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.fleet import Fleet
    from equipoise.gateway.fleet.worker import Worker
    from equipoise.route.account import Charge, WorkerLoad
    from equipoise.route.policy import Ask, RankPolicy, WorkerPolicy

log = logging.getLogger(__name__)

Outcome = Literal["ok", "refused", "failed", "unclear", "cancelled"]
"""How a try went. ok: answered in full; refused: 4xx, the request's own fault; failed: no connection, 5xx, an answer
cut short, a time limit; unclear: a time limit that a pair hit, maybe by the other worker's fault; cancelled: the client
left or the gateway gave the try up."""

UNKNOWN_GRACE_S = 900.0
"""A model that no known worker serves may be served by one that has not answered yet: for so many seconds after it
was added its clients are told to come again (503), later that there is no such model (404)."""
MAX_RETRY_AFTER_S = 60
MAX_GROUPS = 1024
"""Models and roles whose candidates are kept: a bound for names that clients make up."""


@dataclass(frozen=True, slots=True)
class Policies:
    """How workers of one role, and ranks in them, are chosen. `make_worker_policy` makes the object of one model; the
    names are those by which operators know them."""

    worker_name: str
    make_worker_policy: Callable[[], WorkerPolicy]
    rank_name: str
    rank_policy: RankPolicy


class Route:
    """Where one try goes. rank: None where the worker chooses itself. Given back once, to `Router.finished`."""

    __slots__ = ("charge", "epoch", "is_over", "rank", "worker")

    def __init__(self, worker: Worker, rank: int | None, charge: Charge, epoch: int) -> None:
        self.worker = worker
        self.rank = rank
        self.charge = charge
        self.epoch = epoch
        """The breaker's, when the try began."""
        self.is_over = False


class _Group:
    """The workers that may take requests for one model in one role, and the policy that chooses among them."""

    __slots__ = ("loads", "policy", "rank_policy", "workers", "workers_by_name")

    def __init__(self, workers: list[Worker], policy: WorkerPolicy, rank_policy: RankPolicy) -> None:
        self.workers = workers
        self.loads: Sequence[WorkerLoad] = tuple(worker.load for worker in workers)
        self.workers_by_name = {worker.load.name: worker for worker in workers}
        self.policy = policy
        self.rank_policy = rank_policy

    def untried(self, tried: Sequence[Worker]) -> Sequence[WorkerLoad]:
        """The loads of those that are not in `tried`; all where none would be left."""
        return tuple(worker.load for worker in self.workers if worker not in tried) or self.loads


class Router:
    """Chooses worker and rank for each request of a fleet."""

    def __init__(self, fleet: Fleet, policies: Mapping[WorkerRole, Policies]) -> None:
        self._fleet = fleet
        self._policies = dict(policies)
        self._worker_policies: dict[tuple[str, WorkerRole], WorkerPolicy] = {}
        self._groups: dict[tuple[str | None, WorkerRole], _Group] = {}
        self._version = -1
        self.wants_keys: dict[WorkerRole, bool] = {}
        """Whether the worker policy of a role goes by prefix keys: `Ask.keys` is for those only."""
        for role in WORKER_ROLES:
            self.set_policies(role, self._policies[role])
        fleet.listeners.append(self)

    def route(
        self,
        ask: Ask,
        model: str | None,
        role: WorkerRole,
        tried: Sequence[Worker],
        now: float,
        named_rank: int | None = None,
    ) -> Route:
        """Choose a worker that is not in `tried` (while there are others) and a rank, and charge them.

        `named_rank` is the rank that the request itself names, as the worker counts: it is charged, not chosen.
        Raises UnknownModelError, InvalidValueError where a model must be named, NoWorkerError when
        no worker can take it now."""
        fleet = self._fleet
        group = self._group(model, role, now)
        loads = group.untried(tried) if tried else group.loads
        if not loads:
            raise self._no_worker(model, role, now)
        load = group.policy.choose(ask, loads)
        worker = group.workers_by_name[load.name]
        if not worker.places:
            rank = None
        elif named_rank is None:
            rank = group.rank_policy.choose(ask, load)
            if rank is not None and not 0 <= rank < len(worker.places):
                raise IndexError(f"the rank policy chose rank {rank} of {worker.url}, which has {len(worker.places)}")
        else:
            rank = worker.rank_of(named_rank)
        group.policy.routed(ask, load)
        # nothing is taken before here: a policy is an operator's own code and may fail
        if worker.breaker.began():
            fleet.changed()
        charge = load.charge(rank, ask.prompt, ask.output, now)
        worker.num_inflight += 1
        return Route(worker, rank, charge, worker.breaker.epoch)

    def mean_tokens(self, model: str | None, role: WorkerRole, now: float) -> float | None:
        """Tokens believed to be on a rank of the workers that may take a request now, on average; None when none may.

        Raises what `route` does for `model`."""
        loads = self._group(model, role, now).loads
        if not loads:
            return None
        return mean_tokens(loads)

    def finished(
        self,
        route: Route,
        outcome: Outcome,
        now: float,
        num_output: int | None = None,
        ttft_s: float | None = None,
    ) -> None:
        """A try is over: `num_output` tokens came, the first one after `ttft_s` seconds, where known. A second call
        for the same route does nothing."""
        if route.is_over:
            return
        route.is_over = True
        route.charge.end(now, num_output)
        worker = route.worker
        worker.num_inflight -= 1
        if outcome == "ok":
            worker.record.succeeded(ttft_s)
            has_changed = worker.breaker.succeeded(route.epoch)
        elif outcome == "failed":
            worker.record.failed()
            has_changed = worker.breaker.failed(route.epoch, now)
        else:
            if outcome == "unclear":
                # the silent worker fails more often than its peers; breakers of all that it was paired with would open
                worker.record.failed()
            has_changed = worker.breaker.ended(route.epoch)
        if has_changed:
            self._fleet.changed(worker.breaker.next_change_at)
        if worker.num_inflight == 0 and worker.state != "ready":
            self._fleet.ended(worker)

    # Policies

    def policies(self, role: WorkerRole) -> Policies:
        """The policies in force for `role`."""
        return self._policies[role]

    def set_policies(self, role: WorkerRole, policies: Policies) -> None:
        """Choose by `policies` from the next request on. What worker policies of the role had learnt is dropped."""
        self._policies[role] = policies
        self.wants_keys[role] = policies.make_worker_policy().wants_keys
        for key in [key for key in self._worker_policies if key[1] == role]:
            del self._worker_policies[key]
        self._groups.clear()

    def _worker_policy(self, model: str, role: WorkerRole) -> WorkerPolicy:
        policy = self._worker_policies.get((model, role))
        if policy is None:
            policy = self._worker_policies[model, role] = self._policies[role].make_worker_policy()
        return policy

    # What the fleet tells

    def added(self, worker: Worker) -> None:
        """Nothing is known of a new worker."""

    def left(self, worker: Worker) -> None:
        """Policies forget what they knew of `worker`."""
        for policy in self._worker_policies.values():
            try:
                policy.left(worker.load)
            except Exception:  # an operator's own code: the worker leaves all the same
                log.exception("a worker policy failed to forget %s", worker.url)

    def removed(self, worker: Worker) -> None:
        """It left before."""

    # Candidates

    def _group(self, model: str | None, role: WorkerRole, now: float) -> _Group:
        fleet = self._fleet
        if now >= fleet.next_change_at:
            fleet.tick(now)
        if self._version != fleet.version:
            self._version = fleet.version
            self._groups.clear()
        return self._groups.get((model, role)) or self._gather(model, role, now)

    def _gather(self, model: str | None, role: WorkerRole, now: float) -> _Group:
        workers = self._serving(model, role, now)
        eligible = [worker for worker in workers if self._fleet.is_eligible(worker, now)]
        group = _Group(eligible, self._worker_policy(self._name(model, role), role), self._policies[role].rank_policy)
        if len(self._groups) >= MAX_GROUPS:
            self._groups.clear()
        self._groups[model, role] = group
        return group

    def _serving(self, model: str | None, role: WorkerRole, now: float) -> list[Worker]:
        """The workers of `role` that serve `model`, whatever their state. Raises UnknownModelError when none is
        known to and none may turn out to."""
        workers = self._fleet.with_role(role)
        if model is None:
            return workers
        serving = [worker for worker in workers if worker.is_known and worker.serves(model)]
        if serving or any(model in worker.models for worker in self._fleet.workers):
            return serving
        if any(not worker.is_known and now - worker.added_at < UNKNOWN_GRACE_S for worker in workers):
            return [worker for worker in workers if not worker.is_known]
        models = self._fleet.models()
        if not models:
            return workers  # a fleet that is empty, or silent, will not stay so: its clients may come again
        raise UnknownModelError(f"model: there is no model {model!r} here; models: {listed(models)}")

    def _name(self, model: str | None, role: WorkerRole) -> str:
        """Under which name `model` has its worker policy. Those that no worker lists, which clients may make up
        without end, share one."""
        if model is None:
            return self._only_model(role)
        return model if any(model in worker.models for worker in self._fleet.workers) else ""

    def _only_model(self, role: WorkerRole) -> str:
        """The base model that all workers of `role` serve. Raises InvalidValueError when there are several."""
        names = list(dict.fromkeys(worker.models[0] for worker in self._fleet.with_role(role) if worker.models))
        if len(names) > 1:
            raise InvalidValueError(
                f"model: one must be named, several are served: {listed(names)}", "model", "missing_parameter"
            )
        return names[0] if names else ""

    def _no_worker(self, model: str | None, role: WorkerRole, now: float) -> NoWorkerError:
        workers = self._serving(model, role, now)
        what = "requests" if model is None else f"requests for model {model!r}"
        task = "" if role == "mixed" else f"{role} "
        counts: dict[str, int] = {}
        for worker in workers:
            why = self._fleet.why_not(worker, now) or "ready"
            counts[why] = counts.get(why, 0) + 1
        why = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "there is none"
        waits = [worker.breaker.next_change_at - now for worker in workers if worker.breaker.state == "open"]
        retry_after_s = math.ceil(min([*waits, MAX_RETRY_AFTER_S])) if len(waits) == len(workers) > 0 else 1
        return NoWorkerError(f"no {task}worker takes {what} now: {why}", max(1, retry_after_s))
