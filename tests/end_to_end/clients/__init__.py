"""Clients of other makers against a real fleet, unpatched; docs/CLIENTS.md lists them.

Each file is skipped where its client is not installed: `make clients` installs all of them.
"""
