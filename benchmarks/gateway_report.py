"""Figures of benchmarks/gateway.py against their bars, as text for a terminal and as the results file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway_cases import CASES
from gateway_sides import OURS, OURS_CACHE_AWARE, PEERS

if TYPE_CHECKING:
    from collections.abc import Callable

Rounds = dict[str, list[dict[str, Any]]]
BEST = "best peer"
LOST = ("num_bad", "num_short", "num_lost", "num_refused", "num_hanging")
COLUMNS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "closed": (
        ("requests_per_s", "requests/s", 0),
        ("us_per_request", "CPU us per request", 1),
        ("busy", "of a core", 2),
        ("latency_p50_ms", "p50 ms", 2),
        ("latency_p99_ms", "p99 ms", 2),
        ("rss_mb", "MB", 1),
    ),
    "streams": (
        ("us_per_token", "CPU us per token", 1),
        ("tokens_per_s", "tokens/s", 0),
        ("busy", "of a core", 2),
        ("first_p50_ms", "first token p50 ms", 2),
        ("relay_p50_ms", "sent to received p50 ms", 3),
        ("relay_p99_ms", "p99 ms", 2),
        ("rss_mb", "MB", 1),
    ),
    "latency": (
        ("latency_p50_ms", "p50 ms", 3),
        ("added_p50_ms", "added p50 ms", 3),
        ("latency_p90_ms", "p90 ms", 3),
        ("latency_p99_ms", "p99 ms", 3),
        ("us_per_request", "CPU us per request", 1),
    ),
    "concurrent": (
        ("num_asked", "asked", 0),
        ("num_whole", "whole", 0),
        ("num_open", "open at once", 0),
        ("kb_per_stream", "KB per stream", 1),
        ("held_mb", "MB then", 1),
        ("first_p50_ms", "first token p50 ms", 2),
    ),
    "start": (
        ("listening_s", "s to listen", 2),
        ("answering_s", "s to first answer", 2),
        ("idle_mb", "MB idle", 1),
        ("rss_mb", "MB after load", 1),
    ),
    "split": (
        ("requests_per_s", "requests/s", 0),
        ("us_per_request", "CPU us per request", 1),
        ("us_per_token", "CPU us per token", 1),
        ("tokens_per_s", "tokens/s", 0),
        ("latency_p50_ms", "p50 ms", 2),
    ),
}
LAYOUT = {
    "small": "closed",
    "long": "closed",
    "long_mixed": "closed",
    "streams": "streams",
    "latency": "latency",
    "streams_1k": "concurrent",
    "streams_10k": "concurrent",
    "start": "start",
    "split": "split",
}


@dataclass(frozen=True)
class Bar:
    """Our figure over a peer's, and what it must reach; `is_rate`: more is better."""

    case: str
    figure: str
    peer: str
    bar: float | None
    aim: float | None
    is_rate: bool
    side: str = OURS


BARS = (
    Bar("small", "requests_per_s", "smg", 3.0, 5.0, True),
    Bar("small", "requests_per_s", "sglang-router", 2.5, 4.0, True),
    Bar("small", "requests_per_s", "vllm-router", 2.0, 3.5, True),
    Bar("streams", "us_per_token", BEST, 1.0, 0.8, False),
    Bar("latency", "added_p50_ms", "sglang-router", 1.0, 0.4, False),
    Bar("long", "requests_per_s", BEST, 1.0, 2.0, True),
    Bar("long", "requests_per_s", BEST, 1.0, 2.0, True, OURS_CACHE_AWARE),
    Bar("long_mixed", "requests_per_s", BEST, 1.0, 2.0, True),
    Bar("long_mixed", "requests_per_s", BEST, 1.0, 2.0, True, OURS_CACHE_AWARE),
    Bar("start", "rss_mb", "smg", 0.7, 0.5, False),
    Bar("split", "requests_per_s", "smg", None, None, True),
    Bar("split", "us_per_token", "smg", None, None, False),
)
LIMITS = (
    ("streams_1k", "kb_per_stream", 20.0, "KB per stream, aim"),
    ("streams_10k", "kb_per_stream", 20.0, "KB per stream, aim"),
    ("start", "listening_s", 0.5, "s until it listens"),
)


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure; of what was lost, the sum."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: (sum if name in LOST else statistics.median)([each[name] for each in rounds if name in each])
        for name in names
    }


def ratio(bar: Bar, rounds: Rounds) -> float | None:
    """The median, over rounds, of ours over the peer's in the same round; None when either was not measured."""
    peers = [name for name in (PEERS if bar.peer == BEST else (bar.peer,)) if rounds.get(name)]
    if not peers or not rounds.get(bar.side):
        return None
    best: Callable[..., float] = max if bar.is_rate else min
    ratios = []
    for number, ours in enumerate(rounds[bar.side]):
        theirs = best(rounds[name][number][bar.figure] for name in peers)
        if theirs > 0:
            ratios.append(ours[bar.figure] / theirs)
    return statistics.median(ratios) if ratios else None


def verdict(bar: Bar, value: float) -> str:
    def reached(limit: float) -> bool:
        return value >= limit if bar.is_rate else value <= limit

    if bar.bar is None or bar.aim is None:
        return ""
    return "aim reached" if reached(bar.aim) else "bar reached" if reached(bar.bar) else "MISSED"


def bars_table(cases: dict[str, Rounds]) -> list[list[str]]:
    rows = [["case", "figure", "ours", "against", "ratio", "bar", "aim", ""]]
    for bar in BARS:
        value = ratio(bar, cases.get(bar.case, {}))
        if value is not None:
            limits = [f"{limit:g}x" if limit is not None else "" for limit in (bar.bar, bar.aim)]
            figure = bar.figure.replace("_", " ")
            rows.append([bar.case, figure, bar.side, bar.peer, f"{value:.2f}x", *limits, verdict(bar, value)])
    for case, figure, limit, text in LIMITS:
        if ours := cases.get(case, {}).get(OURS):
            value = medians(ours)[figure]
            rows.append([case, text, OURS, "", f"{value:.2f}", "", f"{limit:g}", "yes" if value <= limit else "MISSED"])
    for case in ("streams_1k", "streams_10k"):
        if ours := cases.get(case, {}).get(OURS):
            num_lost = sum(medians(ours).get(name, 0) for name in LOST)
            rows.append([case, "streams lost", OURS, "", f"{num_lost:g}", "0", "", "MISSED" if num_lost else "yes"])
    return rows


def case_table(name: str, rounds: Rounds) -> list[list[str]]:
    columns = COLUMNS[LAYOUT[name]]
    rows = [["", *(title for _, title, _ in columns), "lost"]]
    for side, each in rounds.items():
        found = medians(each)
        figures = [f"{found[key]:,.{digits}f}" if key in found else "" for key, _, digits in columns]
        rows.append([side, *figures, f"{sum(found.get(key, 0) for key in LOST):g}"])
    return rows


def as_text(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if number == 0 else cell.rjust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def as_markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def page(report: dict[str, Any], notes: str) -> str:
    """The results file. `notes` are its last sections, kept from the file before."""
    cases: dict[str, Rounds] = {name: case["rounds"] for name, case in report["cases"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = [
        "# The gateway beside smg, sglang-router and vllm-router",
        f"Machine: {report['machine']}. {versions}.",
        f"Command: `{report['command']}`",
        "A gateway runs on one core, its workers and the load on another; all gateways of a case are up at once and "
        "loaded in turn, round after round. Figures are medians of the rounds, ratios medians of each round's ratio "
        "of ours to theirs. Ours runs with all that it has: tokens per rank (4 ranks a worker, load polls each "
        "second), health checks, breaker, queue, metrics and an access log to a file; the peers log errors only and "
        "route by round_robin, or by cache_aware where prompts are long.",
        "## Against the bars",
        as_markdown(bars_table(cases)),
    ]
    for case in CASES:
        if case.name in cases:
            measured = report["cases"][case.name]
            title = f"## {case.name}: {case.title}"
            when = f"{len(next(iter(cases[case.name].values())))} rounds, {measured['date']}, "
            load = f"load of the machine before it {measured['load_before']:.1f}."
            parts += [title, when + load, as_markdown(case_table(case.name, cases[case.name]))]
    return "\n\n".join(parts) + "\n" + (f"\n{notes}" if notes else "")
