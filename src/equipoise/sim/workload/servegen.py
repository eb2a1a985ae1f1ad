"""Mixes of clients as ServeGen describes them (Alibaba, arXiv 2505.09999): each client has a rate and a burstiness
for every ten minutes, and histograms of its lengths; a workload is all of them together.
"""

from __future__ import annotations

import gzip
import heapq
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from equipoise.errors import ConfigError
from equipoise.sim.workload.arrivals import gamma
from equipoise.sim.workload.lengths import Histogram, pairs
from equipoise.sim.workload.request import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW_S = 600.0


class ClientData(msgspec.Struct, frozen=True):
    """One client: rows of (start, rate a second, CV of gaps, ...), and shares of lengths by name."""

    windows: list[list[float | None]] = msgspec.field(name="windows_start_rate_cv_params")
    hist: dict[str, dict[str, float]]


class MixData(msgspec.Struct, frozen=True):
    """A file of clients."""

    clients: list[ClientData]


def read_mix(path: Path) -> MixData:
    """The clients of a JSON file, gzipped or not. Raises ConfigError when it is none."""
    try:
        raw = path.read_bytes()
        return msgspec.json.decode(gzip.decompress(raw) if path.suffix == ".gz" else raw, type=MixData)
    except OSError as error:
        raise ConfigError(f"workload: {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, EOFError) as error:
        raise ConfigError(f"workload: {path} is not a mix of clients: {error}") from None


def mix(data: MixData, seed: int, scale: float = 1.0) -> Iterator[SimRequest]:
    """All clients' requests by arrival, at `scale` times their rates; the first window begins at 0."""
    if not scale > 0:
        raise ConfigError(f"scale: {scale} must be more than 0")
    starts = [_start(window) for client in data.clients for window in client.windows]
    if not starts:
        raise ConfigError("workload: no client has a window of time")
    origin = min(starts)
    streams = [
        _client(client, np.random.default_rng((seed, number)), scale, origin)
        for number, client in enumerate(data.clients)
        if any(_rate(window) > 0 for window in client.windows)  # those that rest have no histograms
    ]
    return heapq.merge(*streams, key=lambda request: request.arrival_s)


def _start(window: list[float | None]) -> float:
    return float(window[0] or 0.0)


def _rate(window: list[float | None]) -> float:
    return float(window[1] or 0.0)


def _client(client: ClientData, rng: np.random.Generator, scale: float, origin: float) -> Iterator[SimRequest]:
    lengths = pairs(_histogram(client, "input_tokens"), _histogram(client, "output_tokens"), rng)
    for window in client.windows:
        start_s, rate, cv = _start(window) - origin, _rate(window) * scale, float(window[2] or 0.0)
        if rate <= 0:
            continue
        for arrival_s in gamma(rate, cv, rng, start_s):
            if arrival_s >= start_s + WINDOW_S:
                break
            yield SimRequest(arrival_s, *next(lengths))


def _histogram(client: ClientData, name: str) -> Histogram:
    if name not in client.hist:
        raise ConfigError(f"workload: a client has no histogram of {name}: there are {', '.join(client.hist)}")
    return Histogram({int(float(length)): share for length, share in client.hist[name].items()})
