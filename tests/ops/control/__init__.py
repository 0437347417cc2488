"""Tests of ops/control."""
