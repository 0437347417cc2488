"""Limits of tenants, and who keeps the account."""
