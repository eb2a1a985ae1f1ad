"""The gateway's process: start, serve, stop.

start    the fleet with its background tasks, then the data plane; then the socket listens, then the ready line
serve    until a signal comes
close    no new connections, /readiness says 503; what queues is refused, what runs may finish until the time-out
stop     what still runs ends with an error, then connections, background tasks and workers' transports
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from equipoise.gateway.fleet.fleet import Fleet, fleet_limits
from equipoise.gateway.fleet.policies import configured_policies
from equipoise.gateway.fleet.router import Router
from equipoise.gateway.fleet.tend import TendLimits
from equipoise.gateway.fleet.watch import Watch
from equipoise.gateway.fleet.workers_file import WorkersFile, read_workers
from equipoise.gateway.http.descriptors import Descriptors
from equipoise.gateway.http.pool import Pool, PoolLimits
from equipoise.gateway.operate.access_log import AccessLog
from equipoise.gateway.operate.admin import Admin
from equipoise.gateway.operate.metrics import GatewayMetrics
from equipoise.gateway.operate.probes import Probes
from equipoise.gateway.relay.count import PromptCounter
from equipoise.gateway.relay.pairs import Pairs
from equipoise.gateway.relay.plane import Plane, plane_settings
from equipoise.gateway.relay.rooms import Rooms
from equipoise.gateway.relay.routes import worker_routes
from equipoise.gateway.relay.sweep import Sweep
from equipoise.obs.log import setup_logging
from equipoise.route.lengths import Lengths

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from equipoise.config.gateway import GatewayConfig

    OnReady = Callable[[int, int], None]
    """Told how many workers are up, and how many there are."""

log = logging.getLogger(__name__)

BACKLOG = 4096
FIRST_LOOK_S = 0.25
"""Seconds that workers have to be found before the ready line says how many are up; requests are served meanwhile."""
POLL_S = 0.02
FLUSH_S = 2.0
"""Seconds that the last answers have to reach their clients."""
GC_THRESHOLD = (50_000, 20, 100)
"""A request leaves no cycles, so collections find nothing, and with the default of 700 they look for it all the time:
with ten thousand streams open, at all their objects every few seconds, while everybody waits."""


def run_gateway(config: GatewayConfig, listener: socket.socket, on_ready: OnReady) -> int:
    """Serve until told to stop; returns the exit code, 0.

    Raises ConfigError when a policy, the workers' file or the access log is at fault."""
    setup_logging(config.front.log_level, "gateway")
    _raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(Gateway(config).run(listener, on_ready))
    return 0


class Gateway:
    """All parts of one gateway, and the order in which they start and stop."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for what is wrong before anything starts."""
        self._config = config
        self._policies = configured_policies(config.routing)
        path = config.workers.workers_file
        self._workers_file = None if path is None else WorkersFile(Path(path))
        if self._workers_file is not None:
            read_workers(self._workers_file.path)  # a typo in its name must not pass for an empty fleet
        folder = config.workers.tokenizer
        self._counter = None if folder is None else PromptCounter(Path(folder))
        target = config.front.access_log
        self._access_log = None if target is None else AccessLog(target)

    async def run(self, listener: socket.socket, on_ready: OnReady) -> None:
        """From start to stop; returns after a signal, when all is over."""
        stop = asyncio.Event()
        with self._signals(stop):
            sweep = Sweep()
            descriptors = Descriptors()
            fleet, router = self._fleet(sweep, descriptors)
            watch = self._watch(fleet)
            metrics = GatewayMetrics(self._workers_file, descriptors)
            clock = asyncio.get_running_loop().time
            probes = Probes(fleet, router, metrics, clock)
            admin = Admin(self._config, fleet, router, clock, self._access_log)
            routes = worker_routes()
            probes.register(routes, has_metrics=self._config.front.metrics)
            admin.register(routes)
            settings = plane_settings(self._config)
            # rooms must not repeat, neither beside another gateway nor after a restart: their source has no seed
            way = Pairs(router, fleet, sweep, metrics, Rooms(Random()), clock)
            plane = Plane(way, Lengths(), sweep, metrics, routes, settings, self._access_log, self._counter)
            if self._access_log is not None:
                sweep.add_slow(_LogKeeper(self._access_log, metrics))
            try:
                watch.start()
                await self._serve(plane, probes, fleet, listener, on_ready, stop)
            finally:
                plane.close()
                await watch.stop()
                fleet.close()
                sweep.close()
                if self._access_log is not None:
                    self._access_log.close()

    def _fleet(self, sweep: Sweep, descriptors: Descriptors) -> tuple[Fleet, Router]:
        limits = PoolLimits(self._config.limits.connect_timeout_s, self._config.limits.send_timeout_s)
        health = fleet_limits(self._config.health)
        fleet = Fleet(lambda host, port: Pool(host, port, limits, sweep, descriptors), health)
        router = Router(fleet, self._policies)
        now = asyncio.get_running_loop().time()
        for spec in self._config.workers.specs():
            fleet.add(spec, now)
        return fleet, router

    def _watch(self, fleet: Fleet) -> Watch:
        config = self._config
        limits = TendLimits(
            config.routing.load_check_interval_s,
            config.routing.load_stale_s,
            config.health.health_check_timeout_s,
            config.workers.worker_api_key,
        )
        return Watch(fleet, limits, self._workers_file, config.routing.routing_seed)

    async def _serve(
        self,
        plane: Plane,
        probes: Probes,
        fleet: Fleet,
        listener: socket.socket,
        on_ready: OnReady,
        stop: asyncio.Event,
    ) -> None:
        server = await asyncio.get_running_loop().create_server(plane.connection, sock=listener, backlog=BACKLOG)
        await _first_look(fleet, stop)
        gc.collect()
        gc.freeze()  # what start-up left behind is never garbage: leave it out of every collection
        gc.set_threshold(*GC_THRESHOLD)
        on_ready(sum(worker.state == "ready" for worker in fleet.workers), len(fleet.workers))
        await stop.wait()
        probes.is_closing = True
        server.close()
        await self._close(plane)

    async def _close(self, plane: Plane) -> None:
        """Let running requests finish within the time-out, then end the others."""
        timeout_s = self._config.front.shutdown_timeout_s
        if plane.num_busy:
            log.info("closing: %d requests run, they have %g s", plane.num_busy, timeout_s)
        else:
            log.info("closing: no request runs")
        plane.drain()
        await _until_idle(plane, timeout_s)
        if plane.num_busy:
            log.warning("closing: %d requests aborted", plane.num_busy)
        plane.close()
        await _until_idle(plane, FLUSH_S)

    @contextlib.contextmanager
    def _signals(self, stop: asyncio.Event) -> Iterator[None]:
        """The first SIGINT or SIGTERM sets `stop`, the second ends the process at once; SIGHUP opens the log anew."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)
            stop.set()

        def on_hangup() -> None:
            if self._access_log is not None:
                self._access_log.reopen()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)


class _LogKeeper:
    """Flushes the access log, and shows what it dropped, every second."""

    def __init__(self, access_log: AccessLog, metrics: GatewayMetrics) -> None:
        self._access_log = access_log
        self._metrics = metrics

    def check(self, now: float) -> None:
        self._access_log.flush()
        self._metrics.num_log_lines_dropped = self._access_log.num_dropped


async def _first_look(fleet: Fleet, stop: asyncio.Event) -> None:
    """Wait until all workers are up, for FIRST_LOOK_S seconds at most."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + FIRST_LOOK_S
    while loop.time() < deadline and not stop.is_set():
        if fleet.workers and all(worker.state == "ready" for worker in fleet.workers):
            return
        await asyncio.sleep(POLL_S)


async def _until_idle(plane: Plane, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while plane.num_busy and loop.time() < deadline:
        await asyncio.sleep(POLL_S)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Ask for as many open files as the system allows: each stream is a connection of a client and one to a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
