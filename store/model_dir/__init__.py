"""What stands in the directory of a model or an adapter, read within bounds."""
