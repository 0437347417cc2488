"""Simulated rollouts: generated traffic, assigned and judged by production code."""
