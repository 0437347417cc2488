"""Metrics of the server: counters, histograms, and their output for Prometheus."""
