"""Where a server learns which workers it has: settings, a file, DNS or Redis."""
