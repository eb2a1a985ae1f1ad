"""Sweeps to start from; see `equipoise sweep --example list`."""
