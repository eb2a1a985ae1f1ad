"""Policies as operators write them, with options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from equipoise.errors import ConfigError
from equipoise.gateway.fleet.policies import make_policies, read_policy

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
class Mine:
    wants_keys = False
    def __init__(self, **options):
        self.options = options
    def choose(self, ask, workers):
        return workers[0]
    def routed(self, ask, worker): ...
    def left(self, worker): ...
"""


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("random", "random", {}),
        ("a.b:C,tokens=4096", "a.b:C", {"tokens": 4096}),
        ("x, share = 1e-1 ,on=True,off=false,key=v=w", "x", {"share": 0.1, "on": True, "off": False, "key": "v=w"}),
    ],
)
def test_options_follow_the_name(text: str, name: str, options: dict[str, object]) -> None:
    found = read_policy(text)
    assert found == (name, options)
    assert [type(value) for value in found[1].values()] == [type(value) for value in options.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,", "worker policy: 'x,': '' must be OPTION=VALUE"),
        ("x,a", "'a' must be OPTION=VALUE"),
        ("x,=1", "'=1' must be OPTION=VALUE"),
        ("x,a=", "'a=' must be OPTION=VALUE"),
        ("x,a=1,a=2", "a is given twice"),
    ],
)
def test_what_is_no_option_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_policy(text)


def test_every_policy_made_is_given_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_of_an_operator.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    policies = make_policies("policy_of_an_operator:Mine,depth=4", "none", 7)
    assert vars(policies.make_worker_policy()) == {"options": {"seed": 7, "depth": 4}}
