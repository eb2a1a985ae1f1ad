"""The demo model: a tiny Llama that adds and counts, shipped in the package."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Folder of the demo checkpoint: config, weights, tokenizer with chat template, model card."""
    return Path(__file__).parent
