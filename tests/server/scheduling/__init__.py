"""Tests of server/scheduling."""
