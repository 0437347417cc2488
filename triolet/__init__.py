"""Common ground of all folders: config, errors, ids, sampling parameters. Imports no other
folder."""
