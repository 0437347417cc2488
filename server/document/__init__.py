"""The OpenAPI document, generated from the route table and the request models."""
