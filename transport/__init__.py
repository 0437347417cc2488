"""How processes speak: frames, leases, windows, liveness; ZeroMQ on Trio and its in-memory twin."""
