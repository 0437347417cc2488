"""Rollouts of a new model version: the plan, the evidence, and the judge. No I/O, no clock."""
