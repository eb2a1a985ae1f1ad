"""`equipoise gateway`: many workers behind one address."""

from __future__ import annotations

import sys
import time

from equipoise.cli.settings import (
    ConfigFile,
    FrontFlags,
    HealthFlags,
    LimitsFlags,
    QueueFlags,
    RoutingFlags,
    WorkersFlags,
)
from equipoise.config.gateway import (
    FrontConfig,
    GatewayConfig,
    HealthConfig,
    LimitsConfig,
    QueueConfig,
    RoutingConfig,
    WorkersConfig,
)
from equipoise.errors import ConfigError


def gateway(
    *,
    config: ConfigFile = None,
    workers: WorkersFlags = WorkersConfig(),  # noqa: B008
    routing: RoutingFlags = RoutingConfig(),  # noqa: B008
    health: HealthFlags = HealthConfig(),  # noqa: B008
    limits: LimitsFlags = LimitsConfig(),  # noqa: B008
    queue: QueueFlags = QueueConfig(),  # noqa: B008
    front: FrontFlags = FrontConfig(),  # noqa: B008
) -> int:
    """Route requests to workers and their ranks, by tokens, until SIGINT or SIGTERM."""
    del config  # its settings are in the others by now, see cli.settings
    if not workers.specs() and workers.workers_file is None:
        raise ConfigError("worker: there is none: name them with --worker, --prefill and --decode, or --workers-file")
    started = time.monotonic()
    from equipoise.gateway.run import run_gateway
    from equipoise.server.listen import bind

    listener = bind(front.host, front.port)

    def say_ready(num_ready: int, num_workers: int) -> None:
        host = f"[{front.host}]" if ":" in front.host else front.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        seconds = time.monotonic() - started
        state = f"{num_ready} of {num_workers} workers are up"
        print(f"Equipoise routes on {url} ({state}, ready in {seconds:.1f} s)", file=sys.stderr, flush=True)

    settings = GatewayConfig(workers, routing, health, limits, queue, front)
    return run_gateway(settings, listener, say_ready)
