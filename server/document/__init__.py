"""The OpenAPI document, made from what really serves it."""
