"""Load tests: locust users, benchmarks and fault campaigns, with their reports."""
