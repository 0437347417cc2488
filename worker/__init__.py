"""Shared parts of prefill and decode workers: loop, attempt table, sessions, engine interface."""
