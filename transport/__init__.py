"""Communication between processes: frames, leases, windows, liveness, and ZeroMQ links on Trio."""
