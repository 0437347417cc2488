"""The ground floor: config, errors, ids, sampling parameters. Imports nothing of the product."""
