"""The log of administrative events: append-only, signed, kept on disk.

triolet/audit.py is another thing: the accounts of blocks and leases of a running fleet.
"""
