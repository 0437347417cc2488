"""Run tests and benchmarks in stages on a rented GPU machine without a network."""
