"""The example of the routing guide runs as it stands there; its tables name every policy and option."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from equipoise.route.catalog import RANK_POLICIES, WORKER_POLICIES

GUIDE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")


def test_the_policy_of_ones_own_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    definition = example.partition("\n\n\nworkers = ")[0]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "policies.py").write_text(definition)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(example, "routing.md", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", [*WORKER_POLICIES, *RANK_POLICIES])
def test_every_policy_is_in_a_table(name):
    assert re.search(rf"^\| `{name}`", GUIDE, re.MULTILINE)


@pytest.mark.parametrize("name", WORKER_POLICIES)
def test_every_option_is_shown_with_its_default(name):
    for option, parameter in inspect.signature(WORKER_POLICIES[name]).parameters.items():
        if option != "seed":
            row = rf"^\| (.*`{name}`.*|both) \| `{option}` \| {parameter.default} \|"
            assert re.search(row, GUIDE, re.MULTILINE), option
