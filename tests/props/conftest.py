"""Hypothesis profiles: "ci" by default, "deep" for minutes of search (HYPOTHESIS_PROFILE=deep)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("ci", max_examples=150, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.register_profile("deep", max_examples=6000, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.register_profile(
    "quick",
    max_examples=300,
    deadline=None,
    suppress_health_check=SLOW_MACHINES,
    phases=[Phase.generate],
    database=None,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
