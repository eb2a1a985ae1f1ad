"""Workloads as scenarios name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from equipoise.errors import ConfigError
from equipoise.sim.scenario import make_scenario
from equipoise.sim.workload.build import build_workload

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.sim.workload.request import SimRequest


def first(folder: Path, seed: int = 0, **workload: Any) -> list[SimRequest]:
    config = make_scenario({"workload": workload}).workload
    return list(build_workload(config, seed, folder).first())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = ["arrival_s,input_tokens,output_tokens", *(f"{10 * i},{100 + i},{i + 1}" for i in range(400))]
    (tmp_path / "trace.csv").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def test_a_file_keeps_its_times_or_is_sped_up(trace: Path) -> None:
    file = {"kind": "file", "path": "trace.csv", "num_requests": 3}
    assert [body.arrival_s for body in first(trace, **file)] == [0, 10, 20]
    assert [body.arrival_s for body in first(trace, **file, rate_scale=4)] == [0, 2.5, 5]


def test_a_file_at_a_rate_has_the_lengths_recorded_and_times_drawn(trace: Path) -> None:
    bodies = first(trace, kind="file", path="trace.csv", rate=5.0)
    assert [(body.prompt_len, body.output_len) for body in bodies] == [(100 + i, i + 1) for i in range(400)]
    gaps = np.diff([body.arrival_s for body in bodies])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.2)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.25)
    assert bodies == first(trace, kind="file", path="trace.csv", rate=5.0)
    assert bodies != first(trace, seed=1, kind="file", path="trace.csv", rate=5.0)


def test_a_file_in_a_closed_loop_forgets_its_times(trace: Path) -> None:
    assert [body.arrival_s for body in first(trace, kind="file", path="trace.csv", concurrency=3)] == [0, 0, 0]


def test_a_loop_is_open_or_closed(trace: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.rate: 5.0 makes an open loop, concurrency 3 a closed one"):
        first(trace, kind="file", path="trace.csv", concurrency=3, rate=5.0)


@pytest.mark.parametrize("kind", ["lengths", "sessions"])
def test_what_is_drawn_has_an_end(tmp_path: Path, kind: str) -> None:
    assert len(first(tmp_path, kind=kind, rate=2.0, num_requests=7)) == 7
    assert len(first(tmp_path, kind=kind, rate=2.0)) == 1000
