"""The supervisor of a fleet on one machine: plan, processes, restarts, what is shown."""
