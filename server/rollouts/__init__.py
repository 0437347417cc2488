"""Rollouts of model versions, on the servers' side."""
