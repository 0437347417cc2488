"""The HTTP and WebSocket API: request schemas, handlers and response writers."""
