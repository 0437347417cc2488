"""Service level objectives: their file, and the burn rates at which alerts fire."""
