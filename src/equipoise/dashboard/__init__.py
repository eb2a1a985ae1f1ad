"""The live page that the server serves at `/`: one file, nothing fetched from elsewhere, no build step."""

from __future__ import annotations

from pathlib import Path


def dashboard_path() -> Path:
    """The HTML file."""
    return Path(__file__).parent / "index.html"
