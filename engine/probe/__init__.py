"""Measurements of a loaded model: golden tokens and speed."""
