"""Tests of servers on several hosts."""
