"""Hypothesis profiles, by HYPOTHESIS_PROFILE: "ci", the default, "deep" for minutes of search, "quick"."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("ci", max_examples=400, **COMMON)
settings.register_profile("deep", max_examples=6000, **COMMON)
# For trying a change: finds, but does not shrink.
settings.register_profile("quick", max_examples=300, database=None, phases=[Phase.generate], **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
