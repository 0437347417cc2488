"""Service level objectives: counts, burn rates and error budgets of this server."""
