"""Tests of the server's side of rollouts."""
