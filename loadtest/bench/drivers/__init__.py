"""Drivers of the engines and servers that benchmarks compare with, each in its own process."""
