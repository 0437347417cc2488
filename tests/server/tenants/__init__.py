"""Limits of tenants, and the stores of their accounts."""
