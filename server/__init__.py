"""The Trio front: HTTP, SSE, WebSocket, chat page; queue, routing, relay. Never imports torch."""
