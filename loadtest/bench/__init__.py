"""Benchmarks: Triolet compared with other engines and with the machine's limits, in one run."""
