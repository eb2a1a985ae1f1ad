"""Policies by the names that operators give, for each role. A worker policy's options follow its name:
"prefix_tokens,load_weight=0.2"."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError
from equipoise.gateway.fleet.router import Policies
from equipoise.route.catalog import rank_policy, worker_policy

if TYPE_CHECKING:
    from equipoise.config.gateway import RoutingConfig
    from equipoise.config.worker import WorkerRole


_SWITCHES = {"true": True, "false": False}


def make_policies(worker_text: str, rank_name: str, seed: int) -> Policies:
    """Both policies of one role, found and tried. Raises ConfigError in one line when there is none of a name, or
    when an option is wrong."""
    name, options = read_policy(worker_text)
    make = partial(worker_policy, name, seed=seed, options=options)
    make()
    return Policies(worker_text, make, rank_name, rank_policy(rank_name))


def read_policy(text: str) -> tuple[str, dict[str, object]]:
    """The name and the options of "name" or "name,option=value,...". Raises ConfigError for what has no such form.

    Values are numbers, true, false, or else texts."""
    name, *parts = (part.strip() for part in text.split(","))
    options: dict[str, object] = {}
    for part in parts:
        option, equals, value = (each.strip() for each in part.partition("="))
        if not (option and equals and value):
            raise ConfigError(f"worker policy: {text!r}: {part!r} must be OPTION=VALUE")
        if option in options:
            raise ConfigError(f"worker policy: {text!r}: {option} is given twice")
        options[option] = _value(value)
    return name, options


def _value(text: str) -> object:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return _SWITCHES.get(text.lower(), text)


def configured_policies(config: RoutingConfig) -> dict[WorkerRole, Policies]:
    """What the settings ask for. Raises ConfigError."""
    worker_names: dict[WorkerRole, str] = {
        "mixed": config.policy,
        "prefill": config.prefill_policy or config.policy,
        "decode": config.decode_policy or config.policy,
    }
    return {role: make_policies(name, config.rank_policy, config.routing_seed) for role, name in worker_names.items()}
