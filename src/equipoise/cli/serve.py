"""`equipoise serve`: one model behind the OpenAI API."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from equipoise.cli.settings import (
    CacheFlags,
    ConfigFile,
    CostFlags,
    ModelFlags,
    ModelWord,
    RanksFlags,
    SchedulerFlags,
    ServerFlags,
    SimFlags,
)
from equipoise.config import (
    CacheConfig,
    CostConfig,
    EngineConfig,
    ModelConfig,
    RanksConfig,
    SchedulerConfig,
    ServerConfig,
    SimExecutorConfig,
)


def serve(
    word: ModelWord = None,
    /,
    *,
    config: ConfigFile = None,
    model: ModelFlags = ModelConfig(),  # noqa: B008
    ranks: RanksFlags = RanksConfig(),  # noqa: B008
    cache: CacheFlags = CacheConfig(),  # noqa: B008
    scheduler: SchedulerFlags = SchedulerConfig(),  # noqa: B008
    sim: SimFlags = SimExecutorConfig(),  # noqa: B008
    cost: CostFlags = CostConfig(),  # noqa: B008
    server: ServerFlags = ServerConfig(),  # noqa: B008
) -> int:
    """Serve a model with the OpenAI API until SIGINT or SIGTERM."""
    if word is not None:
        model = replace(model, model=word)
    del config  # its settings are in the others by now, see cli.settings
    from equipoise.server.listen import bind

    started = time.monotonic()
    # The port is taken before the model is loaded: a minute of loading must not end in "port in use".
    listener = bind(server.host, server.port)
    from equipoise.server.run import run_server

    name = server.served_model_name or Path(model.model).expanduser().absolute().name

    def say_ready() -> None:
        host = f"[{server.host}]" if ":" in server.host else server.host
        url = f"http://{host}:{listener.getsockname()[1]}"
        seconds = time.monotonic() - started
        print(f"Equipoise serves {name} on {url} (ready in {seconds:.1f} s)", file=sys.stderr, flush=True)

    return run_server(EngineConfig(model, cache, scheduler, sim, ranks, cost), server, name, listener, say_ready)
