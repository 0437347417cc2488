"""Entry point of a text process: `python -m server.text_process`. Imports all text jobs."""

from __future__ import annotations

from .api import json_body
from .api.anthropic import schema as anthropic_schema
from .api.ollama import schema as ollama_schema
from .api.openai import embeddings_schema, responses_schema
from .jobs import forms
from .text import grammar_check, tokenizer
from .text.process import main

JOBS_OF = (json_body, forms, grammar_check, responses_schema, tokenizer)
KINDS_OF = (json_body, forms, embeddings_schema, responses_schema, anthropic_schema, ollama_schema)
"""Modules that define jobs, and the request types that these jobs parse."""

if __name__ == "__main__":
    main()
