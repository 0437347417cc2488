"""Tenants, their keys and quotas, and the stores of their accounts."""
