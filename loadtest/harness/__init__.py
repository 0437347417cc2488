"""Start servers and workers as processes, and send requests; for tests, benchmarks and
campaigns."""
