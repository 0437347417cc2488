"""The audit log of administrative actions: append-only and signed, in a directory on disk.

Not to be confused with triolet/audit.py, the audit of blocks and leases of a running fleet.
"""
