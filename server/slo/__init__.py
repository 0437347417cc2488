"""Service level objectives in the server: counts events, and reports burn rates and error
budgets."""
