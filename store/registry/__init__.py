"""Versions of models in OCI registries: pushed, and pulled into a store."""
