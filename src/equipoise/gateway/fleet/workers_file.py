"""The workers' file: an operator's list of workers that may change while the gateway runs.

    [[workers]]
    url = "http://10.0.0.7:30000"      # the rest may be left out
    role = "prefill"                   # mixed, prefill, decode
    kind = "sglang"                    # auto, equipoise, sglang, vllm, openai
    bootstrap_port = 8998
    models = ["llama-70b"]

TOML, YAML or JSON by the name's ending. A file that cannot be read or is wrong changes nothing.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.config.files import read_table
from equipoise.config.worker import WORKER_KINDS, WORKER_ROLES, WorkerSpec
from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.gateway.fleet.fleet import Fleet

log = logging.getLogger(__name__)

KEYS = frozenset(WorkerSpec.__dataclass_fields__)


def read_workers(path: Path) -> tuple[WorkerSpec, ...]:
    """The workers that the file lists, in its order. Raises ConfigError, which names the entry and what is wrong."""
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise ConfigError(f"workers-file: {path}: it is no file")
    table = read_table(path, "workers-file")
    unknown = sorted(table.keys() - {"workers"})
    if unknown:
        raise ConfigError(f"workers-file: {path}: {unknown[0]!r} is not known; workers are listed under 'workers'")
    entries = table.get("workers", [])
    if not isinstance(entries, list):
        raise ConfigError(f"workers-file: {path}: 'workers' must be a list")
    specs = tuple(_spec(entry, f"workers-file: {path}: worker {place}") for place, entry in enumerate(entries, 1))
    urls = [spec.url for spec in specs]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"workers-file: {path}: {url} is listed twice")
    return specs


def _spec(entry: Any, where: str) -> WorkerSpec:
    if isinstance(entry, str):
        entry = {"url": entry}
    if not isinstance(entry, dict) or "url" not in entry:
        raise ConfigError(f"{where}: a URL is expected, or keys and values with a 'url'")
    unknown = sorted(str(key) for key in entry if key not in KEYS)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not known, only {', '.join(sorted(KEYS))}")
    for key, allowed in (("role", WORKER_ROLES), ("kind", WORKER_KINDS)):
        if key in entry and entry[key] not in allowed:
            raise ConfigError(f"{where}: {key}: {entry[key]!r} must be one of {', '.join(allowed)}")
    try:
        return msgspec.convert(entry, WorkerSpec)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from None


class WorkersFile:
    """The file as it was last taken over into a fleet. `error`: why its present contents were not; None: they were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._specs: dict[str, WorkerSpec] = {}

    def has_changed(self) -> bool:
        """Whether the file is another one than when this was last asked. One that is gone has not changed."""
        try:
            stat = os.stat(self.path)
        except OSError as error:
            self._stamp = None
            self._complain(f"{self.path}: {error.strerror}")
            return False
        stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True

    def read(self) -> tuple[WorkerSpec, ...] | None:
        """What the file lists; None where it is wrong, which the log says once."""
        try:
            specs = read_workers(self.path)
        except ConfigError as error:
            self._complain(str(error))
            return None
        self.error = None
        return specs

    def take_over(self, fleet: Fleet, specs: tuple[WorkerSpec, ...], now: float) -> None:
        """Make the fleet's workers those of `specs`: new ones are added, those gone drain, changed ones start anew.

        Workers that did not come from the file stay as they are."""
        new = {spec.url: spec for spec in specs}
        present = {worker.url: worker for worker in fleet.workers if worker.state != "draining"}
        for url in self._specs:
            if url not in new and url in present:
                fleet.drain(present[url], now)
        taken = {}
        for url, spec in new.items():
            known = self._specs.get(url)
            if known is None and url in present:
                log.warning("worker %s: in the workers' file, but a worker already: left as it is", url)
                continue
            taken[url] = spec
            if known == spec:
                continue  # what was done to it since by other means stays done
            if url in present:
                fleet.change(present[url], spec)
            else:
                fleet.add(spec, now)
        self._specs = taken

    def _complain(self, error: str) -> None:
        if error != self.error:
            log.error("%s; the workers stay as they are", error)
        self.error = error
