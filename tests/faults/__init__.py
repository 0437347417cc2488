"""The fault matrix: every fault in every phase of a request, against real processes."""
