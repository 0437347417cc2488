"""Tests of server/fleet."""
