"""The files and batches API: SQLite storage and the runner of batches."""
