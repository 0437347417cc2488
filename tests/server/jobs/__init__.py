"""Tests of server/jobs."""
