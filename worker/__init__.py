"""What both roles share: the shell around a deciding core, and what a core asks of an engine."""
