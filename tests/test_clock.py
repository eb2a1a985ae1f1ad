"""Virtual time moves when it is told to, forward alone and to the last bit."""

from __future__ import annotations

import pytest

from equipoise.clock import VirtualClock


def test_virtual_time_goes_where_it_is_told() -> None:
    clock = VirtualClock(1.0)
    clock.advance(0.5)
    assert clock.now() == 1.5
    clock.move_to(1e9 / 3)
    assert clock.now() == 1e9 / 3


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock(1.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-0.1)
    with pytest.raises(ValueError, match=r"cannot go back: from 1.0 to 0.9"):
        clock.move_to(0.9)
    assert clock.now() == 1.0
