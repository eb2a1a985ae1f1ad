"""Every error that Equipoise raises on purpose.

EquipoiseError
├── ConfigError            a flag, file or checkpoint is wrong: the command exits with code 2
│   └── CheckpointError    the model folder is missing, broken or of an unsupported type
├── RequestError           one request cannot be served: carries an HTTP status and the field
│   ├── InvalidValueError      400: a field's type, range or content
│   ├── UnauthorizedError      401: a key is missing or wrong
│   ├── ForbiddenError         403: nobody may do this here
│   ├── NotFoundError          404: no such route or request
│   │   └── UnknownModelError      404: no such model
│   ├── WrongMethodError       405: the route exists for other methods
│   ├── TooLargeError          413: the body is over the limit
│   ├── QueueFullError         429: comes with seconds to wait
│   ├── RequestTimeoutError    408: its deadline passed
│   ├── InternalError          500: something broke on our side, the log says what
│   ├── UnavailableError       503: paused, shutting down, or the rank died
│   │   ├── NoDescriptorsError 503: the gateway itself has too many connections open
│   │   ├── NoWorkerError      503: no worker takes the request now; comes with seconds to wait
│   │   └── QueueTimeoutError  503: it waited for a worker too long
│   ├── WorkerFailedError      502: the worker broke off or answered nonsense
│   ├── WorkerTimeoutError     504: the worker took too long
│   └── LoopError              508: the request came back to the gateway that sent it
└── InvariantError         a bug in Equipoise: the engine loop ends loudly
    └── PageError          pages counted wrongly
"""

from __future__ import annotations


class EquipoiseError(Exception):
    """Root of the errors that Equipoise raises on purpose."""


class ConfigError(EquipoiseError):
    """A setting that cannot work; the message is one line that names it, its value and what is allowed."""


class CheckpointError(ConfigError):
    """A model folder that is missing, broken or of an unsupported type."""


class RequestError(EquipoiseError):
    """One request cannot be served. `status` is the HTTP status, `field` the request's field or None."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidValueError(RequestError):
    """A field has a wrong type, range or content; the message names the field, the value and what is allowed."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field)
        self.code = code


class NotFoundError(RequestError):
    """What the request names does not exist."""

    status = 404
    kind = "not_found_error"
    code = "not_found"


class UnknownModelError(NotFoundError):
    """There is no such model; the message names those that there are."""

    code = "model_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class UnauthorizedError(RequestError):
    """The key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """Nobody may do this, as things are set up; the message says what to change."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class WrongMethodError(RequestError):
    """The route exists for other methods."""

    status = 405
    code = "method_not_allowed"


class TooLargeError(RequestError):
    """The request's body is over the server's limit."""

    status = 413
    code = "request_too_large"


class HeadTooLargeError(TooLargeError):
    """Target and headers of the request are over the limit."""

    status = 431


class QueueFullError(RequestError):
    """The waiting queue is full; `retry_after_s` is a whole number of seconds to wait."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(RequestError):
    """The request's deadline passed before it ended."""

    status = 408
    kind = "timeout_error"
    code = "timeout"


class UnavailableError(RequestError):
    """The server cannot take or finish the request: starting, shutting down, or its rank died."""

    status = 503
    kind = "service_unavailable_error"
    code = "unavailable"


class NoWorkerError(UnavailableError):
    """No worker can take the request now; `retry_after_s` is a whole number of seconds to wait."""

    code = "no_worker"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoDescriptorsError(UnavailableError):
    """The gateway has as many files and connections open as it may, and no worker is to blame."""

    code = "no_descriptors"


class QueueTimeoutError(UnavailableError):
    """The request queued as long as a request may, and no worker was free for it."""

    code = "queue_timeout"


class InternalError(RequestError):
    """Something broke on our side; the log says what."""

    status = 500
    kind = "internal_error"
    code = "internal_error"


class WorkerFailedError(RequestError):
    """A worker broke off before its answer began, or what it answered is no answer. The message names phase and
    worker."""

    status = 502
    kind = "worker_error"
    code = "worker_failed"


class WorkerTimeoutError(RequestError):
    """A worker took too long. The message names phase and worker."""

    status = 504
    kind = "timeout_error"
    code = "worker_timeout"


class LoopError(RequestError):
    """A gateway got a request that it sent out itself: it is among its own workers, or among those of one of them."""

    status = 508
    kind = "server_error"
    code = "loop"


class InvariantError(EquipoiseError):
    """A broken invariant: a bug in Equipoise. The message carries the numbers."""


class PageError(InvariantError):
    """Pages counted wrongly: freed twice, grown backwards, owned and free at once."""
