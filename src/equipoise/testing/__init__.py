"""Tools for trying the scheduler: recorded scenarios and their runner."""
