"""Tests of the demo model and of what makes it."""
