"""The other servers: those on this port, and those on other hosts that share idempotency keys."""
