"""Where workers of a fleet run, and how their number is changed there."""
