"""Answers that are given again: what they are called, how they are kept, how they are replayed."""
