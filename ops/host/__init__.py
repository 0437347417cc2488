"""What the host's own programs ask of Triolet: its service manager."""
