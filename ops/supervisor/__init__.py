"""The supervisor of a fleet on one machine: planning, process management, restarts and output."""
