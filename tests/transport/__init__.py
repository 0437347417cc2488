"""Tests of the transport between server and workers: frames, leases, links and handshakes."""
