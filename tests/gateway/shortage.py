"""A process without descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def no_descriptors(limit: int = 512) -> Iterator[Callable[[], None]]:
    """Nothing can be opened in this process while the context is open; what it closes is taken by calling the value."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/", os.O_RDONLY))

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), hard))
    try:
        take_all()
        yield take_all
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
