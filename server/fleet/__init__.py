"""The worker side of the server: who lives, who gets which request, what each request is doing."""
