"""Code that all other folders share: config, errors, ids, sampling parameters. Imports no other
folder."""
