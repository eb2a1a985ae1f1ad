"""HTTP/1.1 towards clients and workers."""
