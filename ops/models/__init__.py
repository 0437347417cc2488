"""The models of a fleet: what a name means, how files come to this machine, what is checked."""
