"""`make setup`: what it would install, and that it sees what an interruption left behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
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


def test_an_old_python_is_passed_over_and_none_is_said_so(tmp_path: Path) -> None:
    for tool in ("sh", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    old = tmp_path / "python3.11"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHON": "/not/there"}
    done = subprocess.run(
        [tmp_path / "sh", ROOT / "scripts" / "setup"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "no Python of 3.11 or newer was found (tried /not/there, " in done.stderr
    assert "Traceback" not in done.stderr
