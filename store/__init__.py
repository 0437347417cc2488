"""The content-addressed store of model versions on this machine, in the form of an OCI image
layout."""
