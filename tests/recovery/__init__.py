"""Tests of recovery as clients see it: server and workers in one process, in virtual time."""
