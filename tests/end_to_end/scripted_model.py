"""A model with scripted answers: a directory with the demo model's tokenizer, a chat template with
tools, and rules for the answers.

Everything else is the product: server, processes, sockets, KV transfer, sampler, grammars. Run as
`python -m tests.end_to_end.scripted_model DIRECTORY …`, it is `triolet …` with scripted workers.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

DEMO: Final = Path(__file__).parents[2] / "triolet" / "demo"
SCRIPT: Final = "script.json"
MAX_MODEL_LEN: Final = 8192
"""Enough for the schemas of several tools, unlike the demo model's 1,024 positions."""
TEMPLATE: Final = """\
{{- '<|bos|>' -}}
{%- if tools -%}
  {{- '<|system|># Tools\\n\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools>\\n\\nA call is JSON within <tool_call></tool_call>.<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- '<|system|>' + message.content + '<|end|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' -}}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>' + message.content + '<|end|>' -}}
  {%- else -%}
    {{- '<|assistant|>' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n<tool_call>\\n{"name": ' + (call.function.name | tojson) -}}
      {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


class Rule(NamedTuple):
    """A scripted answer; the first matching rule of a script applies.

    Attributes:
      last: part of the last user turn or tool result.
      says: the completion.
      shown: further texts that the prompt must contain.
    """

    last: str
    says: str
    shown: tuple[str, ...] = ()


def tool_call(name: str, /, **arguments: object) -> str:
    """Return a tool call in the model's format."""
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def write_model(
    directory: Path, rules: Sequence[Rule] = (), template: str = TEMPLATE, **config: object
) -> Path:
    """Write a model directory; return it.

    Args:
      directory: created if needed.
      rules: see `write_script`.
      template: chat template.
      config: entries to replace in config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DEMO / name, directory / name)
    own = {"max_position_embeddings": MAX_MODEL_LEN} | config
    changes: dict[str, dict[str, Any]] = {
        "config.json": own,
        "tokenizer_config.json": {"model_max_length": MAX_MODEL_LEN, "chat_template": template},
    }
    for name, changed in changes.items():
        entries = json.loads((DEMO / name).read_text(encoding="utf-8"))
        (directory / name).write_text(json.dumps(entries | changed), encoding="utf-8")
    write_script(directory, rules)
    return directory


def write_script(directory: Path, rules: Sequence[Rule]) -> None:
    """Replace the rules of a model; they apply from the next prompt on."""
    written = directory / f"{SCRIPT}.new"
    written.write_text(json.dumps([rule._asdict() for rule in rules]), encoding="utf-8")
    # Atomically: workers may read the script at any time.
    written.replace(directory / SCRIPT)


def read_script(path: Path) -> list[Rule]:
    """Return the rules of a script."""
    rules = json.loads(path.read_text(encoding="utf-8"))
    return [Rule(rule["last"], rule["says"], tuple(rule["shown"])) for rule in rules]


def says(rules: Sequence[Rule], prompt: str) -> str:
    """Return the scripted answer to a prompt, which includes special tokens."""
    last = prompt.replace("<|system|>", "<|user|>").rpartition("<|user|>")[2]
    for rule in rules:
        if rule.last in last and all(text in prompt for text in rule.shown):
            return rule.says
    return f"The script has no rule for: {last}"


def command(directory: Path) -> tuple[str, ...]:
    """Return the command that runs `triolet` with workers scripted by a directory."""
    return (sys.executable, "-m", "tests.end_to_end.scripted_model", str(directory))


def run() -> int:
    """Run as a supervisor that starts scripted workers, or as one of its processes."""
    from ops.cli import main
    from ops.supervisor import serve

    directory, arguments = Path(sys.argv[1]), sys.argv[2:]
    setattr(serve, "command_line", lambda: command(directory))  # noqa: B010
    if arguments[0] != Role.SERVER:
        # This import loads torch. The supervisor forks the template of its workers, which inherit
        # this engine.
        from simulation.timed import TimedEngine
        from worker import entry

        from .scripted_tokens import ScriptedTokens

        engine = partial(TimedEngine, tokens=ScriptedTokens(directory))
        setattr(entry, "LocalEngine", engine)  # noqa: B010
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
