"""Snapshots: packed weights cached on disk between starts and mapped by all processes of a
model."""
