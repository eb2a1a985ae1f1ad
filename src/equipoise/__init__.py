"""Equipoise serves large language models and keeps data-parallel ranks in balance."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.llm import LLM
    from equipoise.request import SamplingParams
    from equipoise.server.client import AsyncEngine

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "SamplingParams", "__version__"]

_HOMES = {"LLM": "equipoise.llm", "AsyncEngine": "equipoise.server.client", "SamplingParams": "equipoise.request"}


def __getattr__(name: str) -> object:
    """Import the public names when they are asked for: the core must not pull in the server."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
