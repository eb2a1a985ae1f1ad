"""A fleet of processes for each test, and one for each module for tests that leave it as they found it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.gateway.processes import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Processes of one test."""
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Processes that the tests of a module share."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
