"""Where a user's own code is looked for."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ASK = "from equipoise.plugins import find_factory; print(find_factory('rule', '{}', 'equipoise.rules').__module__)"


def module_found(name: str, folder: Path) -> str:
    """The module in which a process that was started in `folder`, and does not look there by itself, finds `name`."""
    words = [sys.executable, "-P", "-c", ASK.format(name)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_a_package_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text("def mine(): ...\n")
    assert module_found("my_rules:mine", tmp_path) == "my_rules"


def test_it_replaces_no_installed_one(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def rgb_to_hsv(): ...\nrgb_to_hsv.__module__ = 'mine'\n")
    assert module_found("colorsys:rgb_to_hsv", tmp_path) == "colorsys"
