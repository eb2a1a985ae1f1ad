"""The gateway's own lack of descriptors, no worker's fault: told apart, counted, and logged once an episode."""

from __future__ import annotations

import errno
import logging
import os
from math import inf
from socket import gaierror

log = logging.getLogger(__name__)

QUIET_S = 60.0
"""Seconds without a lack that end an episode."""
_LACKS = (errno.EMFILE, errno.ENFILE)


class Descriptors:
    """What connections to workers take of the process. num_lacked: those that could not be opened for lack of it."""

    def __init__(self) -> None:
        self.num_lacked = 0
        self._lacked_at = -inf

    def lacked(self, error: Exception, now: float) -> bool:
        """Whether `error`, which a connection failed with at `now` (seconds), comes of the gateway's own lack."""
        if not _is_lack(error):
            return False
        self.num_lacked += 1
        if now - self._lacked_at > QUIET_S:
            log.error("no descriptors are left for connections to workers, allow more open files: %s", error)
        self._lacked_at = now
        return True


def _is_lack(error: Exception) -> bool:
    if isinstance(error, gaierror):  # it does not say what the resolver lacked
        return _is_lacking()
    return isinstance(error, OSError) and error.errno in _LACKS


def _is_lacking() -> bool:
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError as error:
        return error.errno in _LACKS
    return False
