"""Tests of server/jobs: files and batches."""
