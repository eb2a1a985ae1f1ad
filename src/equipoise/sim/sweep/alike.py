"""Policies of a sweep that come to the same settings, so that comparing them tells nothing."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import TYPE_CHECKING

from equipoise.config.engine import BALANCE_MARGIN
from equipoise.sim.scenario import as_table
from equipoise.sim.sweep.spec import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.config import SchedulerConfig
    from equipoise.sim.scenario import RoleConfig, Scenario
    from equipoise.sim.sweep.jobs import Job
    from equipoise.sim.sweep.spec import Sweep


def alike(spec: Sweep, jobs: Sequence[Job]) -> list[str]:
    """A line for each two policies that have the same settings at a point: both, and where. `jobs`: those of `spec`."""
    firsts = iter(jobs[:: len(spec.seeds)])
    where: dict[tuple[str, str], list[str]] = {}
    for point in spec.points():
        settings = {policy: str(as_table(_filled(next(firsts).scenario))) for policy in spec.policies}
        for pair in combinations(spec.policies, 2):
            if settings[pair[0]] == settings[pair[1]]:
                where.setdefault(pair, []).append(words(point))
    return [
        f"policies {one} and {other} have the same settings{_at(points, len(spec.points()))}"
        for (one, other), points in where.items()
    ]


def _at(points: list[str], num_points: int) -> str:
    if len(points) == num_points:
        return ""
    more = f" and {len(points) - 1} more of {num_points} points" if len(points) > 1 else ""
    return f" at {points[0]}{more}"


def _filled(scenario: Scenario) -> Scenario:
    """With the values that settings which are not given stand for."""
    return dataclasses.replace(
        scenario,
        scheduler=_filled_scheduler(scenario.scheduler),
        prefill=None if scenario.prefill is None else _filled_role(scenario.prefill),
        decode=None if scenario.decode is None else _filled_role(scenario.decode),
    )


def _filled_role(role: RoleConfig) -> RoleConfig:
    return dataclasses.replace(role, scheduler=_filled_scheduler(role.scheduler))


def _filled_scheduler(config: SchedulerConfig) -> SchedulerConfig:
    if config.balance and config.balance_margin is None:
        return dataclasses.replace(config, balance_margin=BALANCE_MARGIN)
    return config
