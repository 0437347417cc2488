"""Checks of a model before it is loaded. Does not import torch."""
