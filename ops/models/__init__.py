"""The models of a fleet: resolving names to files, downloading, importing and checking them."""
