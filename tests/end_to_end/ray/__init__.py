"""Tests of fleets on Ray. They run in an environment with Ray (`make ray-test`)."""
