"""The gateway's own lack of descriptors, told apart from what workers do."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from tests.gateway.shortage import no_descriptors

from equipoise.gateway.http.descriptors import QUIET_S, Descriptors

if TYPE_CHECKING:
    import pytest


def test_a_lack_is_the_gateways_own_and_all_else_is_not() -> None:
    found = Descriptors()
    assert all(found.lacked(OSError(number, "x"), 0.0) for number in (errno.EMFILE, errno.ENFILE))
    assert not found.lacked(ConnectionRefusedError(errno.ECONNREFUSED, "x"), 0.0)
    assert not found.lacked(UnicodeError("x"), 0.0)
    assert not found.lacked(socket.gaierror(socket.EAI_AGAIN, "x"), 0.0)
    with no_descriptors():
        assert found.lacked(socket.gaierror(socket.EAI_AGAIN, "x"), 0.0)
    assert found.num_lacked == 3


def test_an_episode_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found, error = Descriptors(), OSError(errno.EMFILE, "x")
    for now in (5.0, 6.0, 6.0 + QUIET_S):
        assert found.lacked(error, now)
    assert len(caplog.records) == 1
    assert found.lacked(error, 7.0 + 2 * QUIET_S)
    assert len(caplog.records) == 2
