"""What both roles share: the loop around a deciding core, and what a core asks of an engine."""
