"""Experiments that ship: each answers one question with simulations, or with measurements of the real code.

A module has a function `experiment(options) -> Experiment`; what is registered here is run by
`equipoise experiment NAME`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from equipoise.sim.experiment.rows import Experiment, Options

EXPERIMENTS = {
    "balance": "balance",
    "routing": "routing",
    "async": "overlap",
    "pages": "pages",
    "load": "load",
    "together": "together",
}
"""Modules of this package by the experiments' names."""


def build_experiment(name: str, options: Options) -> Experiment:
    """The experiment called `name`. Raises ConfigError when there is none, or when a trace of it is missing."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment: {name!r} is not known, there are {', '.join(EXPERIMENTS)}")
    module = import_module(f"{__name__}.{EXPERIMENTS[name]}")
    built: Experiment = module.experiment(options)
    return built
