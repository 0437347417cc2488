"""Tests of tools/: the installer, and the demo model's training."""
