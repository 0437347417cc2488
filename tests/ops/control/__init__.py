"""Tests of ops/control, the process that adds, drops, wakes and evicts models."""
