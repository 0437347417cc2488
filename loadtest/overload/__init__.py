"""The load lab: more than a fleet can bear, in virtual time and against real processes."""
