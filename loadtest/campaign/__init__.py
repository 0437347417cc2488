"""Shared parts of campaigns against real processes: requests, faults, and the evaluation of
answers."""
