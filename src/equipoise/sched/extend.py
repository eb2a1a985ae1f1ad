"""Rules from a user's own package, named on the command line: `--rules my_package.rules:my_gate`.

A rule's factory takes the settings and returns an Extension. It is named by a dotted path, or by an entry
point of the group "equipoise.rules":

    def quiet_nights(config: SchedulerConfig, info: ExecutorInfo) -> Extension:
        return Extension(admission_gates=[lambda view: OPEN if view.num_running < 8 else 0])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError
from equipoise.plugins import find_factory

if TYPE_CHECKING:
    from equipoise.config import SchedulerConfig
    from equipoise.exec.protocol import ExecutorInfo
    from equipoise.sched.drafts import Drafter
    from equipoise.sched.rules import Gate, LimitRule, Observer, Order, Outranks, RemoteKV, Resource, VictimOrder

ENTRY_POINTS = "equipoise.rules"


@dataclass(frozen=True)
class Extension:
    """What a rule adds. `order`, `victim_order`, `outranks`, `drafter` and `remote` replace what settings chose."""

    order: Order | None = None
    victim_order: VictimOrder | None = None
    outranks: Outranks | None = None
    limits: Sequence[LimitRule] = ()
    prefill_gates: Sequence[Gate] = ()
    admission_gates: Sequence[Gate] = ()
    resources: Sequence[Resource] = ()
    drafter: Drafter | None = None
    remote: RemoteKV | None = None
    observers: Sequence[Observer] = ()

    def and_then(self, other: Extension) -> Extension:
        """Both; where only one can be, `other` is it."""
        return Extension(
            order=other.order or self.order,
            victim_order=other.victim_order or self.victim_order,
            outranks=other.outranks or self.outranks,
            limits=[*self.limits, *other.limits],
            prefill_gates=[*self.prefill_gates, *other.prefill_gates],
            admission_gates=[*self.admission_gates, *other.admission_gates],
            resources=[*self.resources, *other.resources],
            drafter=other.drafter or self.drafter,
            remote=other.remote or self.remote,
            observers=[*self.observers, *other.observers],
        )


ExtensionFactory = Callable[["SchedulerConfig", "ExecutorInfo"], Extension]


def load_extension(name: str, config: SchedulerConfig, info: ExecutorInfo) -> Extension:
    """The extension called `name`: "module:function", or an entry point. Raises ConfigError in one line."""
    factory = find_factory("rule", name, ENTRY_POINTS)
    try:
        extension = factory(config, info)
    except ConfigError as error:
        raise ConfigError(f"rule: {name}: {error}") from None
    except Exception as error:  # the user's own code: the engine did not fail
        reason = " ".join(str(error).split())
        raise ConfigError(f"rule: {name} failed: {type(error).__name__}: {reason}") from error
    if not isinstance(extension, Extension):
        raise ConfigError(f"rule: {name} returned {type(extension).__name__}, it must return an Extension")
    return extension
