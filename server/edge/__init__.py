"""The socket side of the server: hypercorn, its cures, limits, drain."""
