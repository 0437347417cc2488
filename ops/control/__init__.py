"""`triolet control`: which models of a fleet are resident."""
