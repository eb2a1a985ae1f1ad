"""Results as files: a summary, the scenario as it was run, and columns by request and by step."""

from __future__ import annotations

import math
from importlib.util import find_spec
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import ConfigError
from equipoise.sim.fleet import first_ranks
from equipoise.sim.report.page import save_page
from equipoise.sim.report.sections import sections, subtitle
from equipoise.sim.scenario import as_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from equipoise.sim.report.series import StepSeries
    from equipoise.sim.run import Results
    from equipoise.sim.step_log import StepLog

SUMMARY, SCENARIO, REQUESTS, STEPS = "summary.json", "scenario.yaml", "requests.parquet", "steps.parquet"
REPORT = "report.html"


def check_can_save(folder: Path) -> None:
    """Make `folder`, before hours are spent on results. Raises ConfigError when they could not be written there."""
    if find_spec("pyarrow") is None:
        raise ConfigError("out: Parquet needs pyarrow: install equipoise[sim], or take the summary by --json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"out: {folder}: {error.strerror}") from None


def save(results: Results, folder: Path, log: StepLog | None = None) -> None:
    """Write all that is known into `folder`, which exists; steps when `log` has them."""
    (folder / SUMMARY).write_bytes(summary_json(results))
    (folder / SCENARIO).write_bytes(msgspec.yaml.encode(as_table(results.scenario)))
    _write(folder / REQUESTS, results.columns())
    if log is not None:
        _write(folder / STEPS, log.columns(first_ranks(results.scenario.fleet)))


def check_can_write(option: str, path: Path) -> None:
    """Make the folder of `path`. Raises ConfigError, naming `option`, when the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}") from None


def save_report(results: Results, series: StepSeries, path: Path) -> None:
    """Write a page that shows them. Raises OSError."""
    save_page(path, results.scenario.name, sections(results, series), subtitle=subtitle(results))


def summary_json(results: Results) -> bytes:
    """The summary as an object of JSON; what is not a number is null."""
    numbers = {name: None if math.isnan(value) else value for name, value in results.summary().items()}
    found = {"scenario": results.scenario.name, "seed": results.scenario.seed, "cost": results.cost_source, **numbers}
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def _write(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(dict(columns)), path, compression="zstd")
