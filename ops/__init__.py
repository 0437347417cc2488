"""The command line, the local supervisor, and what operates a fleet."""
