"""Tenants: their plans, the tenants file, and their keys."""
