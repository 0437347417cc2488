"""Tests of servers behind Envoy, with the configuration in ops/deploy."""
