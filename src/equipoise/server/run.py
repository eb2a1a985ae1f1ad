"""The server process: load, serve, stop.

start    engine and rank come up, then the socket listens, then the ready line
serve    until a signal comes or the rank is gone
close    new requests get 503; running ones finish, or are aborted at the time-out
stop     connections end, then the rank
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING

import uvicorn

from equipoise.obs.log import setup_logging
from equipoise.server.app import build_app
from equipoise.server.client import AsyncEngine
from equipoise.server.connection import Connection
from equipoise.server.listen import listen
from equipoise.server.service import Service
from equipoise.server.tools.formats import detect_tool_format
from equipoise.text.chat import ChatTemplate

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from equipoise.config import EngineConfig, ServerConfig

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
DEATH_POLL_S = 0.1
FLUSH_S = 2.0
"""Seconds that failed or aborted requests have to send their last bytes."""


def run_server(
    config: EngineConfig,
    server: ServerConfig,
    model_name: str,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> int:
    """Serve until told to stop; returns the exit code: 0 stopped, 1 the rank died.

    Raises ConfigError when settings or checkpoint are at fault, UnavailableError when the rank cannot start."""
    setup_logging(server.log_level, "server")
    _quiet_uvicorn()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(config, server, model_name, listener, on_ready))


def _quiet_uvicorn() -> None:
    """Its errors go where ours go; what clients send that is no HTTP is not worth a line."""
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = logging.getLogger("equipoise").handlers
    logger.setLevel(logging.ERROR)
    logger.propagate = False


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


async def _run(
    config: EngineConfig,
    server: ServerConfig,
    model_name: str,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> int:
    stop = asyncio.Event()
    with _signals(stop):
        engine = await _start(config, stop)
        if engine is None:
            return 0
        try:
            service = build_service(engine, config, server, model_name)
            return await _serve(service, listener, on_ready, stop)
        finally:
            await engine.stop()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`, the second ends the process at once; its rank ends with it."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _start(config: EngineConfig, stop: asyncio.Event) -> AsyncEngine | None:
    """The engine, serving; None when `stop` came first."""
    starting = asyncio.create_task(AsyncEngine.start(config))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return None
    return starting.result()


def build_service(engine: AsyncEngine, config: EngineConfig, server: ServerConfig, model_name: str) -> Service:
    """The service over a running engine. Raises CheckpointError when a chat template cannot be read."""
    tokenizer = engine.tokenizer
    templates = {
        name: ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
        for name, source in tokenizer.chat_templates.items()
    }
    if "default" not in templates and len(templates) == 1:
        templates["default"] = next(iter(templates.values()))
    sources = "\n".join(tokenizer.chat_templates.values())
    tool_format = detect_tool_format(server.tool_parser, sources)
    log.info("chat template: %s, tool calls: %s", "yes" if templates else "none", tool_format)
    return Service(engine, config, server, model_name, templates, tool_format)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the order of stopping is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(service: Service, listener: socket.socket, on_ready: Callable[[], None], stop: asyncio.Event) -> int:
    listen(listener, BACKLOG)
    web = _Server(
        uvicorn.Config(
            build_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(FLUSH_S),
        )
    )
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    while not web.started and not serving.done():
        await asyncio.sleep(0.005)
    gc.collect()
    gc.freeze()  # what start-up left behind is never garbage: leave it out of every collection
    on_ready()
    code = await _until_the_end(service, stop, serving)
    await _close(service, service.config.shutdown_timeout_s if code == 0 else 0.0)
    web.should_exit = True
    await serving
    return code


async def _until_the_end(service: Service, stop: asyncio.Event, serving: asyncio.Task[None]) -> int:
    """Wait for a signal (0) or for the end of the rank (1)."""
    while not stop.is_set() and not serving.done():
        if service.engine.death is not None:
            log.error("the rank is gone, the server ends: %s", service.engine.death)
            return 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), DEATH_POLL_S)
    return 0


async def _close(service: Service, timeout_s: float) -> None:
    """Refuse new requests; let running ones finish within `timeout_s` seconds, abort the others."""
    service.is_closing = True
    if service.num_running:
        log.info("closing: %d requests run, they have %g s", service.num_running, timeout_s)
    else:
        log.info("closing: no request runs")
    await _wait_for_requests(service, timeout_s)
    aborted = service.abort(None)
    if aborted:
        log.warning("closing: %d generations aborted", aborted)
        await _wait_for_requests(service, FLUSH_S)


async def _wait_for_requests(service: Service, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while service.num_running and loop.time() < deadline:
        await asyncio.sleep(0.02)
