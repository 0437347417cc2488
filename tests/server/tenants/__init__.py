"""Tests of tenants' limits and of the stores of their accounts."""
