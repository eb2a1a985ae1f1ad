"""For operators: probes, admin, metrics, the access log."""
