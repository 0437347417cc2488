"""What makes files that the product ships; no part of the product."""
