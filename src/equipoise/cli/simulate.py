"""`equipoise simulate`: a scenario on virtual time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Group, Parameter

from equipoise.cli import EXIT_OK
from equipoise.cli.examples import text_of
from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from equipoise.sim.run import Results
    from equipoise.sim.scenario import Scenario
    from equipoise.sim.step_log import LossSink, StepSink

_FIELDS = Group("Settings of the scenario, for short", sort_key=1)
_RESULTS = Group("Results", sort_key=2)
TOLD_EVERY = 64
"""Requests between two moves of the progress bar."""


def _field(path: str, text: str) -> Parameter:
    return Parameter(group=_FIELDS, help=f"{text} ({path}).", negative="", show_default=False)


def simulate(
    file: Annotated[Path | None, Parameter(name="SCENARIO", help="YAML, TOML or JSON file.")] = None,
    /,
    *,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", help="Any setting, like fleet.ranks=8; may be repeated.", negative="", group=_FIELDS),
    ] = None,
    workers: Annotated[int | None, _field("fleet.workers", "Model servers")] = None,
    ranks: Annotated[int | None, _field("fleet.ranks", "Ranks of each")] = None,
    lockstep: Annotated[bool | None, _field("fleet.lockstep", "Ranks of a worker step together")] = None,
    max_running: Annotated[int | None, _field("scheduler.max-running", "Seats of a rank")] = None,
    num_pages: Annotated[int | None, _field("cache.num-pages", "KV pages of a rank")] = None,
    trace: Annotated[Path | None, _field("workload.path", "CSV, JSONL or Parquet file of requests")] = None,
    num_requests: Annotated[int | None, _field("workload.num-requests", "Most requests")] = None,
    concurrency: Annotated[int | None, _field("workload.concurrency", "Closed loop: requests at any time")] = None,
    rate: Annotated[float | None, _field("workload.rate", "Open loop: requests per second")] = None,
    rate_scale: Annotated[float | None, _field("workload.rate-scale", "How many times as fast as recorded")] = None,
    worker_policy: Annotated[str | None, _field("routing.worker-policy", "Who chooses the worker")] = None,
    rank_policy: Annotated[str | None, _field("routing.rank-policy", "Who chooses the rank")] = None,
    seed: Annotated[int | None, _field("seed", "Of all that is drawn")] = None,
    json: Annotated[
        bool,
        Parameter(
            group=_RESULTS, negative="", show_default=False, help="Print the summary as JSON instead of a table."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        Parameter(group=_RESULTS, help="Folder for summary.json, scenario.yaml, requests.parquet and report.html."),
    ] = None,
    report: Annotated[
        Path | None, Parameter(group=_RESULTS, help="File for a page with plots that opens offline (.html).")
    ] = None,
    timeline: Annotated[
        Path | None, Parameter(group=_RESULTS, help="File for every step, for ui.perfetto.dev (.json, .json.gz).")
    ] = None,
    steps: Annotated[
        bool,
        Parameter(
            group=_RESULTS, negative="", show_default=False, help="Write steps.parquet too, a row per step and rank."
        ),
    ] = False,
    example: Annotated[
        str | None, Parameter(help="Print a scenario with comments to start from, and end; the word list names them.")
    ] = None,
) -> int:
    """Run a scenario on virtual time: the engine's scheduler and the gateway's policies, without a model."""
    if example is not None:
        from equipoise.sim import examples

        print(text_of(examples, example), end="")
        return EXIT_OK
    short = {
        "fleet.workers": workers,
        "fleet.ranks": ranks,
        "fleet.lockstep": lockstep,
        "scheduler.max_running": max_running,
        "cache.num_pages": num_pages,
        "workload.num_requests": num_requests,
        "routing.worker_policy": worker_policy,
        "routing.rank_policy": rank_policy,
        "workload.rate_scale": rate_scale,
        "seed": seed,
    }
    overrides = [f"{path}={value}" for path, value in short.items() if value is not None]
    overrides += [*_load(concurrency, rate), *_trace(trace), *(set_ or ())]
    _run(*_scenario(file, overrides), files=Files(out, report, timeline), json=json, steps=steps)
    return EXIT_OK


def _load(concurrency: int | None, rate: float | None) -> Iterator[str]:
    """A loop of one kind ends that of the other."""
    if concurrency is not None and rate is not None:
        raise ConfigError(f"rate: {rate} and concurrency: {concurrency}: a loop is open or closed, give one of them")
    if concurrency is not None:
        yield from (f"workload.concurrency={concurrency}", "workload.rate=null")
    if rate is not None:
        yield from (f"workload.rate={rate}", "workload.concurrency=null")


def _trace(path: Path | None) -> Iterator[str]:
    if path is not None:
        yield f"workload.path={msgspec.json.encode(str(path.expanduser().absolute())).decode()}"


def _scenario(file: Path | None, overrides: list[str]) -> tuple[Scenario, Path]:
    """The scenario, and the folder that its paths are under."""
    from equipoise.sim.scenario import make_scenario, read_scenario

    if file is None:
        if not overrides:
            raise ConfigError("scenario: there is none: name a file, or see --example list")
        return make_scenario({}, overrides), Path()
    return read_scenario(file, overrides), file.parent


@dataclass(frozen=True)
class Files:
    """Where results go, beside stdout."""

    out: Path | None
    report: Path | None
    timeline: Path | None

    def check(self) -> None:
        """Before hours are spent. Raises ConfigError when something could not be written."""
        from equipoise.sim.report.charts import check_can_draw
        from equipoise.sim.report.files import check_can_save, check_can_write

        if self.out is not None:
            check_can_save(self.out)
        if self.pages:
            check_can_draw("out" if self.report is None else "report")
        for option, path in (("report", self.report), ("timeline", self.timeline)):
            if path is not None:
                check_can_write(option, path)
        if self.timeline is not None and self.timeline.resolve() in [page.resolve() for page in self.pages]:
            raise ConfigError(f"timeline: {self.timeline} is the report's file too")

    @property
    def pages(self) -> list[Path]:
        """Of the report."""
        from equipoise.sim.report.files import REPORT

        return [path for path in (self.out and self.out / REPORT, self.report) if path is not None]


def _run(scenario: Scenario, folder: Path, *, files: Files, json: bool, steps: bool) -> None:
    from equipoise.sim.report.files import save, save_report, summary_json
    from equipoise.sim.report.series import StepSeries
    from equipoise.sim.report.table import table
    from equipoise.sim.report.timeline import Timeline, open_trace
    from equipoise.sim.step_log import StepLog

    if steps and files.out is None:
        raise ConfigError("steps: they are written to a folder, name it with --out")
    files.check()
    log, series = StepLog() if steps else None, StepSeries() if files.pages else None
    sinks: list[StepSink] = [sink for sink in (log, series) if sink is not None]
    losses = [series] if series else []
    if files.timeline is None:
        results = _with_progress(scenario, folder, sinks, losses)
    else:
        with open_trace(files.timeline) as file:
            timeline = Timeline(file, scenario.fleet)
            results = _with_progress(scenario, folder, [*sinks, timeline], losses)
            timeline.finish(results)
    # Printed before files are written: what took long to find out must not be lost to a full disk.
    print(summary_json(results).decode() if json else table(results), end="" if json else "\n", flush=True)
    if files.out is not None:
        save(results, files.out, log)
    if series is not None:
        for path in files.pages:
            save_report(results, series, path)


def _with_progress(
    scenario: Scenario, folder: Path, sinks: Sequence[StepSink], loss_sinks: Sequence[LossSink]
) -> Results:
    """Run it; on a terminal a bar on stderr tells how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from equipoise.sim.run import simulate

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_terminal) as progress:
        task = progress.add_task(scenario.name, total=scenario.workload.num_requests)

        def move(num_ended: int, now_s: float) -> None:
            if num_ended % TOLD_EVERY == 0:
                progress.update(task, completed=num_ended, description=f"{scenario.name}, second {now_s:,.0f}")

        on_progress: Callable[[int, float], None] | None = move if is_terminal else None
        return simulate(scenario, folder=folder, sinks=sinks, loss_sinks=loss_sinks, on_progress=on_progress)
