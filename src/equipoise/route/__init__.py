"""Where a request goes: believed load per rank, worker policies, rank policies. Plain objects without I/O, clock or
HTTP, used by the server, the gateway and the simulator."""
