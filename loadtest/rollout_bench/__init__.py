"""Benchmark of rollouts: real processes, and candidates with faults."""
