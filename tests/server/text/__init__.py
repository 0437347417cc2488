"""Tests of server/text: tokenizers, chat templates, grammars and tool calls."""
