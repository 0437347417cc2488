"""Tests of sharing idempotency keys between servers on several hosts."""
