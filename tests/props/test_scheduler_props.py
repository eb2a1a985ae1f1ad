"""Random workloads under every combination of features: whatever happens, the invariants of the design hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.props.workloads import run_workload, workloads


@pytest.mark.timeout(1200)  # a failure takes minutes to shrink
@given(workloads())
def test_invariants_hold_and_tokens_equal_those_of_a_request_alone(workload):
    settings, script = workload
    run_workload(settings, script)
