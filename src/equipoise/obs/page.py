"""A page of metrics in Prometheus' text format, made by hand: what a process needs that must start fast and stay small.

Counting is plain arithmetic on attributes, lists and dicts; text is made only when the page is asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf, isnan
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
E2E_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Labels = tuple[tuple[str, str], ...]
Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Observations counted by bucket; an observation equal to a bound belongs below it."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[int]:
        """Observations at or below each bound, and all of them last."""
        return list(accumulate(self._counts))


class Page:
    """The text of a page under way: families one after the other, each with its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: Kind, help_text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """Counters or gauges of one name; a counter's name ends in _total. Left out when there are no samples."""
        rows = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
        if rows:
            self._head(name, kind, help_text)
            self._lines += rows

    def value(self, name: str, kind: Kind, help_text: str, value: float) -> None:
        """One counter or gauge without labels."""
        self.family(name, kind, help_text, [((), value)])

    def histograms(self, name: str, help_text: str, series: Iterable[tuple[Labels, Histogram]]) -> None:
        """Histograms of one name. Left out when there are none."""
        rows: list[str] = []
        for labels, histogram in series:
            counts = histogram.cumulated()
            for bound, count in zip((*histogram.bounds, inf), counts, strict=True):
                rows.append(f"{name}_bucket{_labels((*labels, ('le', _number(bound))))} {count}")
            rows.append(f"{name}_sum{_labels(labels)} {_number(histogram.sum)}")
            rows.append(f"{name}_count{_labels(labels)} {counts[-1]}")
        if rows:
            self._head(name, "histogram", help_text)
            self._lines += rows

    def text(self) -> bytes:
        """The page. What is no Unicode in a label is replaced: one bad name must not hide the others."""
        return "".join(f"{line}\n" for line in self._lines).encode("utf-8", "replace")

    def _head(self, name: str, kind: Kind, help_text: str) -> None:
        escaped = help_text.replace("\\", "\\\\").replace("\n", "\\n")
        self._lines += (f"# HELP {name} {escaped}", f"# TYPE {name} {kind}")


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if value in (inf, -inf):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
