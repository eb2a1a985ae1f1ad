"""The roster: an ordered set of seats."""

from __future__ import annotations

import numpy as np

from equipoise.sched.roster import Roster


def test_seats_stay_in_the_order_in_which_they_came():
    roster = Roster(4)
    for seat in (3, 0, 2):
        roster.append(seat)
    roster.remove(0)
    roster.append(1)
    assert roster.seats().tolist() == [3, 2, 1]
    assert len(roster) == 3


def test_keep_drops_the_others():
    roster = Roster(5)
    for seat in range(5):
        roster.append(seat)
    roster.keep(np.array([True, False, True, False, True]))
    assert roster.seats().tolist() == [0, 2, 4]
    roster.keep(np.zeros(3, bool))
    assert len(roster) == 0
    assert roster.seats().tolist() == []


def test_a_full_roster_can_be_emptied_and_filled_again():
    roster = Roster(2)
    for _ in range(3):
        roster.append(0)
        roster.append(1)
        roster.remove(0)
        roster.remove(1)
    assert len(roster) == 0
