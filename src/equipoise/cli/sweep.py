"""`equipoise sweep`: a scenario at many points, with several policies on the same seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from equipoise.cli import EXIT_FAILED, EXIT_OK
from equipoise.cli.examples import text_of
from equipoise.config.checks import at_least
from equipoise.errors import ConfigError
from equipoise.machine import num_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from equipoise.sim.sweep.jobs import Job
    from equipoise.sim.sweep.results import SweepResults
    from equipoise.sim.sweep.spec import Sweep

_WHAT = Group("What is run", sort_key=1)
_RESULTS = Group("Results", sort_key=2)
MOST_PROCESSES = 1024


def _list(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, negative="", show_default=False)


def sweep(
    file: Annotated[Path | None, Parameter(name="FILE", help="YAML, TOML or JSON: a scenario, or a sweep.")] = None,
    /,
    *,
    vary: Annotated[
        list[str] | None,
        _list(
            _WHAT,
            "Field and values, like fleet.ranks=2,4,8 or cost.step-ms=10..50:10; may be repeated. + joins fields.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, _list(_WHAT, "NAME=field=value,field=value; may be repeated, all run on the same seeds.")
    ] = None,
    baseline: Annotated[
        str | None, Parameter(group=_WHAT, help="The policy to compare with; the first when not given.")
    ] = None,
    seeds: Annotated[int | None, Parameter(group=_WHAT, help="Runs of each, from the scenario's seed on.")] = None,
    set_: Annotated[
        list[str] | None, Parameter(name="--set", group=_WHAT, negative="", help="Any setting, like workload.rate=8.")
    ] = None,
    processes: Annotated[
        int | None, Parameter(group=_WHAT, help="Simulations at a time; as many as cores when not given.")
    ] = None,
    dry_run: Annotated[
        bool, Parameter(group=_WHAT, negative="", show_default=False, help="List points and policies.")
    ] = False,
    metrics: Annotated[
        str | None, Parameter(group=_RESULTS, help="Numbers to compare, like throughput_tok_s,ttft_mean_ms.")
    ] = None,
    pareto: Annotated[
        str | None, Parameter(group=_RESULTS, help="Two numbers to draw against each other, x,y.", show_default=False)
    ] = None,
    json: Annotated[
        bool, Parameter(group=_RESULTS, negative="", show_default=False, help="Print JSON instead of a table.")
    ] = False,
    out: Annotated[
        Path | None, Parameter(group=_RESULTS, help="Folder for rows, plots, and runs: the same command goes on there.")
    ] = None,
    example: Annotated[
        str | None, Parameter(help="Print a sweep with comments to start from, and end; the word list names them.")
    ] = None,
) -> int:
    """Run a scenario over fields and seeds, and compare policies: gains with their intervals, plots, Pareto fronts."""
    if example is not None:
        from equipoise.sim.sweep import examples

        print(text_of(examples, example), end="")
        return EXIT_OK
    at_least("processes", processes, 1, MOST_PROCESSES)
    spec = _spec(file, vary or [], policy or [], set_ or [], _given(baseline, seeds, metrics, pareto))
    jobs = spec.jobs()
    _warn_of_alike(spec, jobs)
    if dry_run:
        print("\n".join(_what_would_run(spec)))
        return EXIT_OK
    return _run(spec, jobs, out, min(processes or num_cores(), len(jobs)), json=json)


def _given(baseline: str | None, seeds: int | None, metrics: str | None, pareto: str | None) -> dict[str, object]:
    found = {"baseline": baseline, "seeds": seeds, "metrics": metrics, "pareto": pareto}
    return {name: value for name, value in found.items() if value is not None}


def _spec(file: Path | None, vary: list[str], policy: list[str], fixed: list[str], given: dict[str, object]) -> Sweep:
    """What the file says, and the flags on top. Raises ConfigError."""
    from equipoise.sim.sweep.read import make_sweep, read_sweep, with_axes
    from equipoise.sim.sweep.values import axis_of, policy_of, setting_of

    if file is None:
        raise ConfigError("sweep: there is none: name a file, or see --example list")
    told: dict[str, Any] = {**read_sweep(file), **given}
    told["vary"] = with_axes(told.get("vary", {}), [axis_of(each) for each in vary])
    told["policies"] = {**told.get("policies", {}), **dict(policy_of(each) for each in policy)}
    told["set"] = {**told.get("set", {}), **dict(setting_of("set", each) for each in fixed)}
    return make_sweep(**told)


def _run(spec: Sweep, jobs: list[Job], out: Path | None, num_processes: int, *, json: bool) -> int:
    from equipoise.sim.report.charts import check_can_draw
    from equipoise.sim.report.files import check_can_save
    from equipoise.sim.sweep.files import results_json, save
    from equipoise.sim.sweep.page import save_report
    from equipoise.sim.sweep.table import table

    if out is not None:
        check_can_draw("out")
        check_can_save(out)
    _tell_size(spec, jobs, out, num_processes)
    results = _with_progress(spec, jobs, out, num_processes)
    if out is not None:
        save(results, out)
        save_report(results, out)
    print(results_json(results).decode() if json else table(results), end="" if json else "\n")
    return EXIT_FAILED if results.failures else EXIT_OK


def _warn_of_alike(spec: Sweep, jobs: list[Job]) -> None:
    from equipoise.sim.sweep.alike import alike

    for each in alike(spec, jobs):
        print(f"equipoise: warning: {each}", file=sys.stderr, flush=True)


def _what_would_run(spec: Sweep) -> Iterator[str]:
    """Points, policies with what they set, and the number of runs."""
    from equipoise.sim.sweep.spec import words

    if spec.fields:
        yield "points"
        yield from (f"  {words(point)}" for point in spec.points())
    yield "policies"
    yield from (f"  {policy}: {words(settings) or 'sets nothing'}" for policy, settings in spec.policies.items())
    yield f"seeds\n  {', '.join(map(str, spec.seeds))}"
    yield _size(spec)


def _size(spec: Sweep) -> str:
    parts = (f"{len(spec.points())} points", f"{len(spec.policies)} policies", f"{len(spec.seeds)} seeds")
    return f"{spec.num_runs} runs ({' x '.join(parts)})"


def _tell_size(spec: Sweep, jobs: list[Job], out: Path | None, num_processes: int) -> None:
    """How many runs there are, and about how long they take, on stderr."""
    from equipoise.sim.sweep.estimate import estimate_s
    from equipoise.sim.sweep.jobs import missing
    from equipoise.sim.sweep.run import RUNS

    left = missing(jobs, None if out is None else out / RUNS)
    kept = f", {len(left)} of them still to do" if len(left) < len(jobs) else ""
    print(f"{_size(spec)}{kept}", file=sys.stderr, flush=True)
    if left:
        seconds = estimate_s(left, num_processes)
        told = "a time that cannot be told yet" if seconds is None else f"about {_duration(seconds)}"
        print(f"they take {told} in {num_processes} processes", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _with_progress(spec: Sweep, jobs: list[Job], out: Path | None, num_processes: int) -> SweepResults:
    """Run them; on a terminal a bar on stderr tells how far it is. Interrupted, it says what is kept."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from equipoise.sim.sweep.run import run_sweep

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    num_ended = 0
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task(spec.name, total=len(jobs))

            def move(num_done: int, _num_jobs: int) -> None:
                nonlocal num_ended
                num_ended = num_done
                bar.update(task, completed=num_done)

            return run_sweep(spec, jobs, num_processes=num_processes, out=out, on_progress=move)
    except KeyboardInterrupt:
        where = "lost, they are kept with --out DIR" if out is None else f"in {out}, the same command goes on with them"
        print(f"equipoise: interrupted, {num_ended} of {len(jobs)} runs are {where}", file=sys.stderr)
        raise
