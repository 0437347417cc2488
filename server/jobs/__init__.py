"""Files and batches: what outlives the process, and the work that it is for."""
