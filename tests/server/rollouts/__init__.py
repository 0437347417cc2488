"""Tests of server/rollouts: golden prompts and shadow copies."""
