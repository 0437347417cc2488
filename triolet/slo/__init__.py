"""Service level objectives: reads their file, and defines the burn rates at which alerts fire."""
