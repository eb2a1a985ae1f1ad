"""Many simulations: in parallel, resumable, compared on the same seeds."""
