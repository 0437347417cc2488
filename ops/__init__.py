"""Operating a fleet: the command line, the local supervisor, model control and the audit log."""
