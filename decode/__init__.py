"""The decode worker process: receives KV, generates tokens continuously, and streams them."""
