"""Policies by name, and what is refused in one line."""

from __future__ import annotations

import pytest

from equipoise.errors import ConfigError
from equipoise.route.catalog import WORKER_POLICIES, rank_policy, worker_policy

MODULE = "policies_of_a_user"
SOURCE = """
class First:
    wants_keys = False
    def __init__(self, seed, depth=1):
        self.depth = depth
    def choose(self, ask, workers):
        return workers[0]
    def routed(self, ask, worker): ...
    def left(self, worker): ...

class Zero:
    def choose(self, ask, worker):
        return 0

class Nothing:
    def __init__(self, seed=0): ...

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    installed = tmp_path / "policies_of_a_user-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: policies-of-a-user\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        f"[equipoise.worker_policies]\nfirst = {MODULE}:First\nrandom = {MODULE}:First\n"
        f"[equipoise.rank_policies]\nzero = {MODULE}:Zero\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["first", f"{MODULE}:First"])
def test_a_users_worker_policy_is_found(name):
    assert worker_policy(name, options={"depth": 4}).depth == 4


@pytest.mark.parametrize("name", ["zero", f"{MODULE}:Zero"])
def test_a_users_rank_policy_is_found(name):
    assert type(rank_policy(name)).__name__ == "Zero"


def test_no_package_replaces_a_built_in_policy():
    assert type(worker_policy("random")) is WORKER_POLICIES["random"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "least_token",
            {},
            "'least_token' is not known, allowed are prefix_tokens, .*, random, first, random, or pack",
        ),
        ("no_such_module:x", {}, "cannot be loaded: No module named"),
        (f"{MODULE}:absent", {}, "cannot be loaded: .*absent"),
        (":", {}, "cannot be loaded"),
        (f"{MODULE}:NUMBER", {}, "is not a function"),
        (f"{MODULE}:Nothing", {}, "Nothing lacks wants_keys, choose, routed or left"),
        (f"{MODULE}:Zero", {}, "has no option 'seed'"),
        ("first", {"width": 4}, "worker policy first: has no option 'width', allowed are depth"),
        ("random", {"width": 4}, "allowed are none"),
        ("first", {"depth": "x"}, "worker policy first: depth is 'x', it must be a number"),
        ("first", {"depth": True}, "depth is True, it must be a number"),
        ("prefix_tokens", {"load_weight": 0}, "worker policy prefix_tokens: load_weight is 0, it must be above 0"),
        ("prefix_tokens", {"max_keys": 1}, "max_keys is 1"),
        ("cache_aware", {"max_load": 0.5}, "max_load is 0.5, it must be at least 1"),
        ("consistent_hashing", {"max_load": 0.5}, "max_load is 0.5, it must be at least 1"),
    ],
)
def test_a_worker_policy_that_cannot_be_is_refused_in_one_line(name, options, message):
    with pytest.raises(ConfigError, match=message) as refused:
        worker_policy(name, options=options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "rank policy: 'best' is not known, allowed are minimum_tokens, .*, none, zero"),
        (f"{MODULE}:Nothing", "Nothing has no method choose"),
    ],
)
def test_a_rank_policy_that_cannot_be_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        rank_policy(name)
    assert "\n" not in str(refused.value)
