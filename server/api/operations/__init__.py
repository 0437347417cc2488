"""Handlers for operators and web pages: health checks, metrics, status, audit, usage."""
