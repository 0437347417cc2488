"""The HTTP server: API routes, SSE, WebSockets, web pages, request queue and routing to workers.

Runs on Trio and never imports torch.
"""
