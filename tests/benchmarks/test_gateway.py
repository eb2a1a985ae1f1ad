"""benchmarks/gateway.py: its worker and its load answer for what they count, and the bars are compared rightly."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gateway_report")


@pytest.fixture
def worker_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(FOLDER))
    sides = importlib.import_module("gateway_sides")
    bench = sides.Bench(sides.Cores(*_cores()), sides.Programs(None, None, None), tmp_path)
    with bench.workers(1) as workers:
        yield workers.mixed[0]


def _cores() -> tuple[int, int]:
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def _post(url: str, content: dict[str, object], **headers: str) -> bytes:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(content).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def test_a_quick_run_measures_every_kind_of_load(tmp_path: Path) -> None:
    cores = ",".join(map(str, _cores()))
    flags = ["--quick", "--no-wrk", "--sides", "direct", "--only", "small,streams,latency,streams_1k", "--cores", cores]
    command = [sys.executable, str(FOLDER / "gateway.py"), *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "gateway.json").read_text(encoding="utf-8"))["cases"]
    rounds = {name: case["rounds"]["direct"] for name, case in cases.items()}
    assert rounds["small"][0]["requests_per_s"] > 0
    assert rounds["streams"][0]["tokens_per_s"] > 0
    assert rounds["latency"][0]["added_p50_ms"] == 0
    assert rounds["streams_1k"][0]["num_whole"] == rounds["streams_1k"][0]["num_asked"] == 100
    lost = ("num_bad", "num_short", "num_lost", "num_refused", "num_hanging")
    assert not any(each[0].get(name, 0) for each in rounds.values() for name in lost)
    page = (tmp_path / "gateway.md").read_text(encoding="utf-8")
    assert "## streams: 256 streams of 64 tokens" in page


def test_the_worker_streams_what_was_asked_and_counts_ranks(worker_url: str) -> None:
    asked: dict[str, object] = {"stream": True, "max_tokens": 3, "messages": []}
    events = _post(worker_url, asked, **{"X-Data-Parallel-Rank": "2"}).split(b"\n\n")
    assert len(events) == 5  # three tokens, [DONE], nothing after it
    _post(worker_url, {"messages": [], "routed_dp_rank": 2})
    counts = _get(f"{worker_url}/counts")
    assert counts["served"][2] == 2 + (sum(counts["served"]) - 2) // 4
    loads = _get(f"{worker_url}/v1/loads")["loads"]
    assert [load["num_used_tokens"] for load in loads] == [0, 0, 0, 0]


def test_the_worker_refuses_a_rank_that_it_has_not(worker_url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        _post(worker_url, {"messages": []}, **{"X-Data-Parallel-Rank": "4"})


def test_a_ratio_is_the_median_of_the_rounds_own_ratios(report: ModuleType) -> None:
    rounds = {
        "equipoise": [{"requests_per_s": 300.0}, {"requests_per_s": 80.0}, {"requests_per_s": 500.0}],
        "smg": [{"requests_per_s": 100.0}, {"requests_per_s": 20.0}, {"requests_per_s": 100.0}],
        "vllm-router": [{"requests_per_s": 50.0}, {"requests_per_s": 40.0}, {"requests_per_s": 125.0}],
    }
    bar = report.Bar("small", "requests_per_s", "smg", 3.0, 5.0, True)
    assert report.ratio(bar, rounds) == 4.0
    best = report.Bar("small", "requests_per_s", report.BEST, 3.0, 5.0, True)
    assert report.ratio(best, rounds) == 3.0
    assert report.ratio(report.Bar("small", "requests_per_s", "sglang-router", 3.0, 5.0, True), rounds) is None


@pytest.mark.parametrize(
    ("is_rate", "value", "expected"),
    [
        (True, 5.0, "aim reached"),
        (True, 3.0, "bar reached"),
        (True, 2.9, "MISSED"),
        (False, 0.8, "aim reached"),
        (False, 1.0, "bar reached"),
        (False, 1.1, "MISSED"),
    ],
)
def test_a_verdict_knows_which_way_is_better(report: ModuleType, is_rate: bool, value: float, expected: str) -> None:
    bar, aim = (3.0, 5.0) if is_rate else (1.0, 0.8)
    assert report.verdict(report.Bar("case", "figure", "smg", bar, aim, is_rate), value) == expected
