"""Packed weights that are kept between starts, and mapped by every process of their model."""
