"""Tests of server/scheduling: admission, queues, routing and recovery of requests."""
