"""Sources of a server's list of workers: settings, a file, DNS or Redis."""
