"""`equipoise experiment`: the experiments that ship, each by one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from equipoise.cli import EXIT_OK
from equipoise.config.checks import at_least
from equipoise.errors import ConfigError
from equipoise.machine import num_cores

if TYPE_CHECKING:
    from equipoise.sim.experiment.rows import Experiment, Row

MOST_SEEDS, MOST_PROCESSES = 1000, 1024


def experiment(
    name: Annotated[
        str | None, Parameter(name="NAME", help="balance, routing, async, pages, load or together.", show_default=False)
    ] = None,
    /,
    *,
    quick: Annotated[
        bool, Parameter(negative="", show_default=False, help="A cut of the whole, in about a minute on 2 cores.")
    ] = False,
    json: Annotated[Path | None, Parameter(help="File for the rows: a policy at a point each.")] = None,
    out: Annotated[
        Path | None, Parameter(help="Folder for NAME.json, plots as SVG, and the results on the page NAME.md.")
    ] = None,
    processes: Annotated[
        int | None, Parameter(help="Simulations at a time; as many as there are cores when not given.")
    ] = None,
    seeds: Annotated[int, Parameter(help="Runs of every simulation, each with what another seed draws.")] = 1,
    traces: Annotated[
        Path | None, Parameter(help="Folder of recorded traces; docs/experiments says where to get them.")
    ] = None,
) -> int:
    """Answer a question about scheduling or routing: simulate, and print a table.

    A run with --out or --json that was ended goes on where it was when it is started again."""
    from equipoise.sim.experiment import EXPERIMENTS, build_experiment
    from equipoise.sim.experiment.files import check_can_save, save, save_rows
    from equipoise.sim.experiment.rows import Options
    from equipoise.sim.experiment.show import as_text

    at_least("processes", processes, 1, MOST_PROCESSES)
    at_least("seeds", seeds, 1, MOST_SEEDS)
    if name is None:
        raise ConfigError(f"experiment: name one of {', '.join(EXPERIMENTS)}")
    built = build_experiment(name, Options(quick, traces))
    if out is not None:
        check_can_save(out)
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"json: {json.parent} is no folder")
    if json is not None and json.is_dir():
        raise ConfigError(f"json: {json} is a folder")
    kept = _kept(name, json, out)
    rows = _with_progress(built, seeds, processes or num_cores(), kept)
    if json is not None:
        save_rows(rows, json)
    if out is not None:
        save(built, rows, out, _command(name, quick=quick, seeds=seeds, traces=traces, out=out))
    if kept is not None:
        kept.unlink(missing_ok=True)
    print(f"{built.question}\n\n{as_text(built.tables(rows))}")
    return EXIT_OK


def _kept(name: str, json: Path | None, out: Path | None) -> Path | None:
    """Where finished simulations wait for the others: beside the rows."""
    if out is not None:
        return out / f"{name}.part"
    return None if json is None else json.with_name(f"{json.name}.part")


def _command(name: str, *, quick: bool, seeds: int, traces: Path | None, out: Path) -> str:
    words = [
        "equipoise experiment",
        name,
        *(["--quick"] if quick else []),
        *([f"--seeds {seeds}"] if seeds > 1 else []),
    ]
    return " ".join(
        [*words, *(["--traces DIR"] if traces else []), f"--out {out}" if not out.is_absolute() else "--out DIR"]
    )


def _with_progress(built: Experiment, seeds: int, processes: int, kept: Path | None) -> list[Row]:
    """Run it; on a terminal a bar on stderr tells how far it is."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from equipoise.sim.experiment.run import run_experiment

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(built.name, total=len(built.trials) * seeds)

        def move(num_done: int, num_jobs: int) -> None:
            progress.update(task, completed=num_done, total=num_jobs)

        return run_experiment(built, num_seeds=seeds, num_processes=processes, kept=kept, on_progress=move)
