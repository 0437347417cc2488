"""The entry point of the command `triolet`."""
