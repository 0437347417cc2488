"""Tests of third-party clients, unpatched, against a real fleet. docs/CLIENTS.md lists them.

A file is skipped if its client is not installed; `make clients` installs all of them.
"""
