"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from equipoise.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
MAX_BODY_MB = 1024
ToolParser = Literal["auto", "hermes", "llama3", "mistral", "pythonic", "none"]
TOOL_PARSERS: tuple[ToolParser, ...] = get_args(ToolParser)


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, who may call it and how it stops."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""

    served_model_name: str | None = None
    """Name of the model in the API; the checkpoint folder's name when not given."""

    api_key: str | None = None
    """Key that clients must send as a bearer token; no key is asked for when not given."""

    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from; "*" for any."""

    max_body_mb: float = 32.0
    """Largest request body, in MiB; a larger one is refused with 413."""

    request_timeout_s: float | None = None
    """Seconds after which a request is ended; no limit when not given."""

    shutdown_timeout_s: float = 10.0
    """Seconds that running requests are given to finish when the server is told to stop."""

    tool_parser: ToolParser = "auto"
    """Format of the model's tool calls; "auto" takes the one that its chat template speaks of."""

    log_level: LogLevel = "info"
    """Least that is logged."""

    log_requests: bool = False
    """Log a line, at info, for every request for tokens when it ends."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} must be at least 0 and at most 65535")
        if not 0 < self.max_body_mb <= MAX_BODY_MB:
            raise ConfigError(f"max-body-mb: {self.max_body_mb} must be more than 0 and at most {MAX_BODY_MB}")
        if not self.shutdown_timeout_s >= 0:
            raise ConfigError(f"shutdown-timeout: {self.shutdown_timeout_s} must be at least 0")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request-timeout: {self.request_timeout_s} must be more than 0")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log-level: {self.log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.tool_parser not in TOOL_PARSERS:
            raise ConfigError(f"tool-parser: {self.tool_parser!r} must be one of {', '.join(TOOL_PARSERS)}")
        if self.api_key is not None and not (self.api_key.strip() and self.api_key.isascii()):
            raise ConfigError("api-key: it must be ASCII and not empty, clients send it in a header")
