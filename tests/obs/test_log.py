"""Logging goes to stderr, one line per record, and leaves other loggers alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from equipoise.obs.log import current_level, setup_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("equipoise")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def test_lines_name_process_level_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    num_root_handlers = len(logging.getLogger().handlers)
    setup_logging("info", "rank 3")
    setup_logging("info", "rank 3")
    logging.getLogger("equipoise.engine.loop").info("paused: %s", "all")
    logging.getLogger("equipoise.engine.loop").debug("unseen")
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.endswith(" INFO rank 3 equipoise.engine.loop: paused: all")
    assert len(logging.getLogger().handlers) == num_root_handlers


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_level_can_be_handed_on(level: str) -> None:
    setup_logging(level, "server")
    assert current_level() == level
