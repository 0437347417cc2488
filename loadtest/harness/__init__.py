"""What starts servers and workers for tests, benchmarks and campaigns, and asks them."""
