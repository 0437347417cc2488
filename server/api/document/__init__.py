"""The OpenAPI document beyond the types of fields: conditions between them, and bounds."""
