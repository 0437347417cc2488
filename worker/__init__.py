"""What both kinds of worker share: the shell around a deciding core, and what a core may ask of it."""
