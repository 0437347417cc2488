"""Forms of tool calls that are not JSON, and which model writes which form."""
