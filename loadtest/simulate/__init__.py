"""The production protocol code in virtual time, with seeded misfortune and invariants."""
