"""Tests of servers behind Envoy with its configuration in ops/deploy."""
