"""The role `control`: loads, unloads, adds and switches the models of a running fleet."""
