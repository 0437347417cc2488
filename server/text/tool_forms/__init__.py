"""Parsers and grammars of the tool call and reasoning formats that models write."""
