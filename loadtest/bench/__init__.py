"""Benchmarks: Triolet beside its peers and beside the machine's limits, in one run."""
