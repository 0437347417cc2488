"""The load lab: overload a fleet, in virtual time and with real processes."""
