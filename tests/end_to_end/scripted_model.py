"""A model whose answers are given by a script: a directory with the demo model's tokenizer, a chat
template that shows tools, and the rules by which workers answer.

Everything else is the product: server, processes, sockets, KV on its way, sampler, grammars. Run as
`python -m tests.end_to_end.scripted_model DIRECTORY …` it is `triolet …` with scripted workers.
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
"""Room for the schemas of several tools; the demo model's own 1,024 positions hold few of them."""
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
    """What the model answers to some prompts; the first rule of a script that matches counts.

    Attributes:
      last: part of the last turn of the user, or of the last result of a tool.
      says: the completion.
      shown: what else the prompt has to hold, anywhere.
    """

    last: str
    says: str
    shown: tuple[str, ...] = ()


def tool_call(name: str, /, **arguments: object) -> str:
    """Return a call of a tool as the model writes it."""
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def write_model(
    directory: Path, rules: Sequence[Rule] = (), template: str = TEMPLATE, **config: object
) -> Path:
    """Write a model directory; return it.

    Args:
      directory: made if it is not there.
      rules: see `write_script`.
      template: for chats.
      config: replaces entries of config.json.
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
    """Let a model answer by these rules from its next prompt on."""
    written = directory / f"{SCRIPT}.new"
    written.write_text(json.dumps([rule._asdict() for rule in rules]), encoding="utf-8")
    # In one piece: workers look for a new script at any time.
    written.replace(directory / SCRIPT)


def read_script(path: Path) -> list[Rule]:
    """Return the rules of a script."""
    rules = json.loads(path.read_text(encoding="utf-8"))
    return [Rule(rule["last"], rule["says"], tuple(rule["shown"])) for rule in rules]


def says(rules: Sequence[Rule], prompt: str) -> str:
    """Return the answer to a prompt, special tokens included in it."""
    last = prompt.replace("<|system|>", "<|user|>").rpartition("<|user|>")[2]
    for rule in rules:
        if rule.last in last and all(text in prompt for text in rule.shown):
            return rule.says
    return f"The script has no rule for: {last}"


def command(directory: Path) -> tuple[str, ...]:
    """Return what means `triolet` with workers that answer by the script in a directory."""
    return (sys.executable, "-m", "tests.end_to_end.scripted_model", str(directory))


def run() -> int:
    """Become a supervisor that starts scripted workers, or one of its processes."""
    from ops.cli import main
    from ops.supervisor import serve

    directory, arguments = Path(sys.argv[1]), sys.argv[2:]
    setattr(serve, "command_line", lambda: command(directory))  # noqa: B010
    if arguments[0] != Role.SERVER:
        # Torch comes with it. A supervisor is itself forked from a process that has torch; the
        # template of its workers, which it forks, and they have this engine then.
        from simulation.timed import TimedEngine
        from worker import entry

        from .scripted_tokens import ScriptedTokens

        engine = partial(TimedEngine, tokens=ScriptedTokens(directory))
        setattr(entry, "LocalEngine", engine)  # noqa: B010
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
