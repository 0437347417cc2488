"""The content-addressed store of model versions on this machine: an OCI image layout."""
