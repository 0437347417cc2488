"""What the OpenAPI document says beyond the types of fields: conditions between them, and bounds."""
