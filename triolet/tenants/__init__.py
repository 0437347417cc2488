"""Tenants: their plans, the file that names them, and their keys."""
