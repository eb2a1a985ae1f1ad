"""How a worker is named: on the command line, in a workers' file, in a request to the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from equipoise.errors import ConfigError

WorkerKind = Literal["auto", "equipoise", "sglang", "vllm", "openai"]
WORKER_KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)
WorkerRole = Literal["mixed", "prefill", "decode"]
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
DEFAULT_PORT = 80


@dataclass(frozen=True)
class WorkerSpec:
    """One worker as its operator names it; what is left open is asked of the worker itself."""

    url: str
    """Where it listens, "http://host:port"; brought into that form."""

    role: WorkerRole = "mixed"
    """What it does of a request."""

    kind: WorkerKind = "auto"
    """Which server it is; "auto" asks it."""

    bootstrap_port: int | None = None
    """Port at which a prefill worker meets decode workers."""

    models: tuple[str, ...] = ()
    """Models that it serves; it is asked when there are none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", worker_url(self.url))
        if self.role not in WORKER_ROLES:
            raise ConfigError(f"role: {self.role!r} must be one of {', '.join(WORKER_ROLES)}")
        if self.kind not in WORKER_KINDS:
            raise ConfigError(f"kind: {self.kind!r} must be one of {', '.join(WORKER_KINDS)}")
        if self.bootstrap_port is not None:
            if self.role != "prefill":
                raise ConfigError(f"bootstrap-port: only a prefill worker has one, {self.url} is {self.role}")
            if not 1 <= self.bootstrap_port <= 65535:
                raise ConfigError(f"bootstrap-port: {self.bootstrap_port} must be at least 1 and at most 65535")


def worker_url(text: str) -> str:
    """`text` as "http://host:port": the scheme may be left out, a slash at the end does not matter.

    Raises ConfigError when it is no such URL. Two texts that mean the same worker give the same URL."""
    given = text.strip()
    if "," in given:
        raise ConfigError(f"worker: {text!r}: one URL is expected, every worker is named by itself")
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"worker: {text!r} is not a URL like http://host:port: {error}") from None
    if parts.scheme != "http":
        raise ConfigError(f"worker: {text!r}: only http:// is spoken to workers, not {parts.scheme}://")
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if not host or port == 0 or extra or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(f"worker: {text!r} is not a URL like http://host:port")
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{DEFAULT_PORT if port is None else port}"


def prefill_worker(text: str, kind: WorkerKind = "auto") -> WorkerSpec:
    """The prefill worker that "URL" or "URL,BOOTSTRAP_PORT" names. Raises ConfigError."""
    url, comma, port = text.partition(",")
    if not comma:
        return WorkerSpec(url, "prefill", kind)
    if not (port.strip().isascii() and port.strip().isdigit()):
        raise ConfigError(f"prefill: {text!r}: after the comma comes the bootstrap port, a whole number")
    return WorkerSpec(url, "prefill", kind, int(port))
