"""Rules named by a dotted path: what is found, and what is refused in one line."""

from __future__ import annotations

import pytest
from tests.sched.rig import Rig, make_info

from equipoise.config import SchedulerConfig
from equipoise.errors import ConfigError, InvariantError
from equipoise.sched.extend import Extension, load_extension

MODULE = "rules_of_a_user"


@pytest.fixture
def module(tmp_path, monkeypatch):
    source = """
from equipoise.errors import ConfigError
from equipoise.sched.extend import Extension

def closed(config, info):
    return Extension(admission_gates=[lambda view: 0])

def nothing(config, info):
    return None

def takes_nothing():
    return Extension()

def refuses(config, info):
    raise ConfigError("needs two ranks")

def fails(config, info):
    raise KeyError("two\\nlines")

NUMBER = 3
"""
    (tmp_path / f"{MODULE}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("module")
def test_a_rule_by_its_dotted_path_is_in_force():
    rig = Rig(rules=(f"{MODULE}:closed",))
    rig.add("a")
    assert rig.step() == []
    assert rig.scheduler.explain("a")[0].held_by == "closed"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:rule", "cannot be loaded: No module named"),
        (f"{MODULE}:absent", "cannot be loaded: .*absent"),
        (f"{MODULE}:NUMBER", "is not a function"),
        (f"{MODULE}:nothing", "returned NoneType, it must return an Extension"),
        (f"{MODULE}:takes_nothing", "failed: TypeError: takes_nothing"),
        (f"{MODULE}:refuses", "refuses: needs two ranks"),
        (f"{MODULE}:fails", "failed: KeyError: "),
        ("absent", "neither module:function nor"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load_extension(name, SchedulerConfig(), make_info())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["order", "victim_order", "outranks", "drafter", "remote"])
def test_the_later_extension_wins_where_only_one_can_be(field):
    first, second = Extension(**{field: "first"}), Extension(**{field: "second"})
    assert getattr(first.and_then(second), field) == "second"
    assert getattr(first.and_then(Extension()), field) == "first"


@pytest.mark.parametrize("field", ["limits", "prefill_gates", "admission_gates", "resources", "observers"])
def test_lists_are_joined_in_order(field):
    assert getattr(Extension(**{field: [1]}).and_then(Extension(**{field: [2]})), field) == [1, 2]


@pytest.mark.parametrize("answer", [-1, 5, 10**12, None, 1.0, float("nan"), "1"])
def test_a_limit_that_answers_nonsense_is_named(answer):
    def odd(_request, _n):
        return answer

    rig = Rig(Extension(limits=[lambda _view: odd]))
    rig.add("a", 4)
    with pytest.raises(InvariantError, match=r"the limit test_a_limit.* answered .* for 4 tokens"):
        rig.plan()


@pytest.mark.parametrize("answer", [None, 0.5, float("nan"), "1"])
@pytest.mark.parametrize("kind", ["prefill_gates", "admission_gates"])
def test_a_gate_that_answers_nonsense_is_named(kind, answer):
    def odd(_view):
        return answer

    rig = Rig(Extension(**{kind: [odd]}))
    rig.add("a", 4)
    with pytest.raises(InvariantError, match=r"the gate test_a_gate.* answered"):
        rig.plan()


@pytest.mark.parametrize("kind", ["prefill_gates", "admission_gates"])
def test_a_gate_below_zero_is_closed(kind):
    rig = Rig(Extension(**{kind: [lambda _view: -3]}))
    rig.add("a", 4)
    assert rig.step() == []
