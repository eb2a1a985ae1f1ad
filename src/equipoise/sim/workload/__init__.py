"""What arrives: recorded traces, generated mixes, closed loops and sessions, one request at a time.

A workload is read as the simulation goes on, so a trace of a million requests does not need its memory.
"""
