"""Tests of the sources from which a server learns its workers."""
