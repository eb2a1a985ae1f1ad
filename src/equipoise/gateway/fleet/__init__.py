"""The workers: what they are, how they are, how loaded, and which of them serves a request."""
