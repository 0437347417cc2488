"""Engines and fronts that benchmarks compare with, each driven in a process of its own."""
