"""Stages that run on a rented GPU machine: packed, started, measured, and their results kept."""
