"""Other servers: those on the same port, and those on other hosts that share idempotency keys."""
