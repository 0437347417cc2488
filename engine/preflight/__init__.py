"""What can be known about a model before anything of it is loaded. Imports no torch."""
