"""What is shown and kept of a simulation's results."""
