"""Tests of ops: the command line, the supervisor, settings and audits."""
