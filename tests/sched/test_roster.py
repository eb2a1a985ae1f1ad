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


def test_many_leave_at_once_and_who_is_not_there_is_ignored():
    roster = Roster(5)
    for seat in (4, 0, 2, 1):
        roster.append(seat)
    roster.remove_all(np.array([0, 1, 3]))
    assert roster.seats().tolist() == [4, 2]
    roster.append(0)  # its leaving is over
    roster.remove_all(np.array([4]))
    assert roster.seats().tolist() == [2, 0]
    roster.remove_all(np.array([0, 2]))
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
