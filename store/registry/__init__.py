"""Push model versions to OCI registries, and pull them into a store."""
