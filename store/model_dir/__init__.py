"""Read files in a model's or adapter's directory within bounds."""
