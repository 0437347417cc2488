"""Settings of all processes: reading files, options and pipes, validation, and conversion."""
