"""Equipoise serves large language models and keeps data-parallel ranks in balance."""

__version__ = "0.1.0"
