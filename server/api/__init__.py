"""The outside surface: request schemas, routes, and how answers are written."""
