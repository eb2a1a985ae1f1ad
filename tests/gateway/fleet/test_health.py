"""Health: which rows of checks change it."""

from __future__ import annotations

import pytest

from equipoise.gateway.fleet.health import Health, HealthLimits


@pytest.mark.parametrize(
    ("checks", "is_healthy"),
    [
        ("", True),
        ("--", True),
        ("---", False),
        ("--+--", True),
        ("---+", False),
        ("---+-+", False),
        ("---++", True),
        ("---++--", True),
        ("---++---", False),
    ],
)
def test_rows_of_checks(checks: str, is_healthy: bool) -> None:
    health = Health(HealthLimits(max_failures=3, num_successes=2))
    num_changes = sum(health.checked(check == "+") for check in checks)
    assert health.is_healthy is is_healthy
    assert num_changes % 2 == (not is_healthy)


def test_reset_makes_it_healthy_from_the_beginning() -> None:
    health = Health(HealthLimits(max_failures=2))
    health.checked(False)
    health.reset()
    assert not health.checked(False)
    assert health.checked(False)
    health.reset()
    assert health.is_healthy
