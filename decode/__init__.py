"""The decode worker process: receives KV, decodes continuously, streams tokens."""
