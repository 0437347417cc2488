"""Tests of server/text."""
