"""Policies by name: a built-in one, an entry point, or a dotted path `package.module:attribute`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError
from equipoise.plugins import find_factory, plugin_names
from equipoise.route import affinity, ranks, workers
from equipoise.route.policy import RankPolicy, WorkerPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WORKER_POLICIES: Mapping[str, Callable[..., WorkerPolicy]] = {
    "prefix_tokens": affinity.PrefixTokens,
    "cache_aware": affinity.CacheAware,
    "consistent_hashing": affinity.ConsistentHashing,
    "least_tokens": workers.LeastTokens,
    "least_load": workers.LeastLoad,
    "power_of_two": workers.PowerOfTwo,
    "round_robin": workers.RoundRobin,
    "random": workers.Random,
}
RANK_POLICIES: Mapping[str, Callable[[], RankPolicy]] = {
    "minimum_tokens": ranks.MinimumTokens,
    "round_robin": ranks.RoundRobin,
    "follow_room": ranks.FollowRoom,
    "none": ranks.EngineChoice,
}
WORKER_ENTRY_POINTS = "equipoise.worker_policies"
RANK_ENTRY_POINTS = "equipoise.rank_policies"


def worker_policy(name: str, *, seed: int = 0, options: Mapping[str, object] | None = None) -> WorkerPolicy:
    """The worker policy called `name`, made with `seed` and `options` as keywords.

    Raises ConfigError in one line when there is none of that name, or it does not take these options."""
    factory = find_policy("worker policy", name, WORKER_POLICIES, WORKER_ENTRY_POINTS)
    policy = call(f"worker policy {name}", factory, {"seed": seed, **(options or {})})
    if not isinstance(policy, WorkerPolicy):
        raise ConfigError(f"worker policy {name}: {type(policy).__name__} lacks wants_keys, choose, routed or left")
    return policy


def rank_policy(name: str) -> RankPolicy:
    """The rank policy called `name`. Raises ConfigError in one line when there is none."""
    policy = call(f"rank policy {name}", find_policy("rank policy", name, RANK_POLICIES, RANK_ENTRY_POINTS), {})
    if not isinstance(policy, RankPolicy):
        raise ConfigError(f"rank policy {name}: {type(policy).__name__} has no method choose")
    return policy


def find_policy(
    kind: str, name: str, built_in: Mapping[str, Callable[..., object]], group: str
) -> Callable[..., object]:
    """What makes the policy `name`. Built-in names come first, so that no package replaces one unnoticed."""
    if name in built_in:
        return built_in[name]
    if ":" not in name and name not in (installed := plugin_names(group)):
        known = ", ".join([*built_in, *installed])
        raise ConfigError(f"{kind}: {name!r} is not known, allowed are {known}, or package.module:attribute")
    return find_factory(kind, name, group)


def call(what: str, factory: Callable[..., object], options: Mapping[str, object]) -> object:
    """`factory(**options)`; ConfigError when it does not take them."""
    parameters = inspect.signature(factory).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            known = ", ".join(name for name in parameters if name != "seed") or "none"
            raise ConfigError(f"{what}: has no option {option!r}, allowed are {known}")
        if option in parameters and _is_number(parameters[option].default) and not _is_number(options[option]):
            raise ConfigError(f"{what}: {option} is {options[option]!r}, it must be a number")
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
