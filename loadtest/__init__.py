"""Load: locust users, benchmarks, reports."""
