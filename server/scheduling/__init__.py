"""The life of a request: queue, admission, routing, attempts on workers, output."""
