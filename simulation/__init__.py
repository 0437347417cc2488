"""Server and workers in memory and virtual time, with seeded faults."""
