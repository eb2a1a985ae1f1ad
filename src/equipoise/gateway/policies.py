"""Policies by the names that operators give, for each role."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from equipoise.gateway.router import Policies
from equipoise.route.catalog import rank_policy, worker_policy

if TYPE_CHECKING:
    from equipoise.config.gateway import RoutingConfig
    from equipoise.config.worker import WorkerRole


def make_policies(worker_name: str, rank_name: str, seed: int) -> Policies:
    """Both policies of one role, found and tried. Raises ConfigError in one line when there is none of a name."""
    make = partial(worker_policy, worker_name, seed=seed)
    make()
    return Policies(worker_name, make, rank_name, rank_policy(rank_name))


def configured_policies(config: RoutingConfig) -> dict[WorkerRole, Policies]:
    """What the settings ask for. Raises ConfigError."""
    worker_names: dict[WorkerRole, str] = {
        "mixed": config.policy,
        "prefill": config.prefill_policy or config.policy,
        "decode": config.decode_policy or config.policy,
    }
    return {role: make_policies(name, config.rank_policy, config.routing_seed) for role, name in worker_names.items()}
