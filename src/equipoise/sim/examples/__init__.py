"""Scenarios to start from; see `equipoise simulate --example list`."""
