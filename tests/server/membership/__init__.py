"""Tests of the sources of a server's list of workers."""
