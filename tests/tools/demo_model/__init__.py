"""Tests of the demo model, and of the programs that train and export it."""
