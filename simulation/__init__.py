"""Simulate a fleet: servers and workers in memory and virtual time, with seeded faults."""
