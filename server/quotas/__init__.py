"""What tenants may use, what they have used, and who keeps the account of it."""
