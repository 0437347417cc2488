"""Tests of pushing model versions to OCI registries and pulling them."""
