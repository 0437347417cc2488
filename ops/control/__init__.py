"""`triolet control`: which models of a fleet are resident, and who asked for it."""
