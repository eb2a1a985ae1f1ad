"""`make setup`: what it would install, and that it sees what an interruption left behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("torch>=2.11", "torch"),
        ("prometheus_client >= 0.20", "prometheus-client"),
        ("uvloop>=0.21; sys_platform != 'win32'", "uvloop"),
        ("equipoise[engine]", "equipoise"),
        ("Jinja2", "jinja2"),
    ],
)
def test_names_are_read_as_indexes_write_them(setup_env: ModuleType, requirement: str, name: str) -> None:
    assert setup_env.name_of(requirement) == name


def test_everything_for_serving_and_testing_is_wanted_but_not_the_project(setup_env: ModuleType) -> None:
    wanted = {setup_env.name_of(each) for each in setup_env.requirements(PROJECT)}
    assert {"starlette", "torch", "xgrammar", "pytest", "ruff", "mypy", "openai"} <= wanted
    assert "equipoise" not in wanted


def test_every_wanted_package_has_a_tested_version(setup_env: ModuleType) -> None:
    pinned = dict(setup_env.pins())
    for requirement in setup_env.requirements(PROJECT):
        assert setup_env.name_of(requirement) in pinned


def test_a_package_is_whole_when_every_file_is_as_recorded(setup_env: ModuleType, tmp_path: Path) -> None:
    info = tmp_path / "some-1.0.dist-info"
    info.mkdir()
    assert not setup_env.is_whole(info), "no RECORD: pip was ended before the last step"
    (tmp_path / "some.py").write_text("x = 1\n")
    (info / "RECORD").write_text("some.py,sha256=abc,6\n__pycache__/some.pyc,,\nsome-1.0.dist-info/RECORD,,\n")
    assert setup_env.is_whole(info)
    (tmp_path / "some.py").write_text("x =")
    assert not setup_env.is_whole(info), "half a file"
    (tmp_path / "some.py").unlink()
    assert not setup_env.is_whole(info), "a file is missing"


def run_setup(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`scripts/setup` where the only Python is one too old."""
    for tool in ("sh", "dirname"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    old = folder / "python3.11"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return subprocess.run(
        [folder / "sh", ROOT / "scripts" / "setup"],
        env={**environment, "PATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_an_old_python_is_passed_over_and_none_is_said_so(tmp_path: Path) -> None:
    done = run_setup(tmp_path)
    assert done.returncode == 2
    assert "no Python of 3.11 or newer was found (tried " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_python_that_is_named_is_taken_or_none(tmp_path: Path) -> None:
    works = tmp_path / "python3"
    works.write_text('#!/bin/sh\ncase $1 in -c) exit 0;; esac\necho "$0 makes it"\n')
    works.chmod(0o755)
    done = run_setup(tmp_path, PYTHON="/not/there")
    assert done.returncode == 2
    assert done.stderr == "setup: /not/there, which PYTHON names, does not run or is older than Python 3.11\n"
    assert done.stdout == ""


def test_a_venv_of_another_python_than_the_named_one_is_made_anew(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho '(3, 10, 1)'\n")
    other.chmod(0o755)
    monkeypatch.delenv("PYTHON", raising=False)
    assert not setup_env.is_unlike_named(other), "none is named: the one there will do"
    monkeypatch.setenv("PYTHON", sys.executable)
    assert setup_env.is_unlike_named(other)
    assert not setup_env.is_unlike_named(Path(sys.executable))
