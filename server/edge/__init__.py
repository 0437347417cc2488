"""The socket side of the server: connections, HTTP/1.1, WebSockets, and adapters for Quart."""
