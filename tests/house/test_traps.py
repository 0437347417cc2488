"""Tests of docs/traps.md: the guards it names exist, and forbidden code does not."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import version
from typing import TYPE_CHECKING

from .test_layout import ROOMS, ROOT, functions_of, imports_of, nodes_of, shown, sources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAPS = ROOT / "docs" / "traps.md"
PRODUCT = [room for room in ROOMS if room not in {"loadtest", "tools"}]


def product_files() -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file of the product."""
    for path in sources(*PRODUCT):
        yield shown(path), path


def rows() -> list[list[str]]:
    """Return the cells of every row of the page's tables, without headers."""
    lines = re.findall(r"^\| (.+) \|$", TRAPS.read_text(encoding="utf-8"), re.MULTILINE)
    return [line.split(" | ") for line in lines if not line.startswith("what happens")]


def test_every_trap_has_a_cure_and_a_test_that_exists() -> None:
    missing = []
    assert len(rows()) > 35
    for what, cure, kept_by in rows():
        assert what, cure
        named = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", kept_by)
        assert named, what
        for file, names in named:
            path = ROOT / file
            tests = {node.name for node in (functions_of(path) if path.exists() else ())}
            missing += [
                f"{file}: {name}" for name in re.findall(r"\w+", names) if name not in tests
            ]
        assert len(re.findall(r"`test_\w+`", kept_by)) == sum(
            len(re.findall(r"\w+", names)) for _, names in named
        ), f"no such test file: {kept_by}"
    assert missing == []


WALL_CLOCKS = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
CLOCK_WORDS = {name.partition(".")[2] for name in WALL_CLOCKS}
MAY_TELL_THE_TIME = {
    "ops/control/control.py": "`created_at` of an operation",
    "ops/cli/audit_commands.py": "which entries are shown",
    "ops/cli/usage_commands.py": "which records are summed",
    "ops/cli/tenant_commands.py": "when a key that is replaced ends",
    "ops/supervisor/terminal_view.py": "shown beside each line",
    "server/api/access.py": "whether a key has ended",
    "server/api/generate.py": "`created` of an answer",
    "server/api/ollama/chat.py": "`created_at` of an answer",
    "server/api/openai/responses_events.py": "`created_at` of a response",
    "server/api/services.py": "`created` of a model",
    "server/rollouts/collector.py": "when a request ended, for a control on another host",
    "server/scheduling/control_link.py": "whether the clock by which controls are ordered is ahead",
    "server/tenants/memory_store.py": "the month of what is spent",
    "server/tenants/usage_ledger.py": "when a request ended, in a record that outlives the process",
    "server/text/template.py": "the date in a prompt",
    "ops/audit/log.py": "dates of entries and heads, which other processes sign too",
    "store/aliases.py": "when a tag or alias moved",
    "store/receipts.py": "whether a file changed just before it was read",
    "server/jobs/storage.py": "dates of what outlives a process, and a lease among several",
}


def test_the_time_of_day_decides_nothing() -> None:
    told = {
        name
        for name, path in product_files()
        if any(
            node.attr in CLOCK_WORDS and ast.unparse(node).endswith(tuple(WALL_CLOCKS))
            for node in nodes_of(path)[ast.Attribute]
        )
        or any(
            node.module == "time"
            and any(f"time.{alias.name}" in WALL_CLOCKS for alias in node.names)
            for node in nodes_of(path)[ast.ImportFrom]
        )
    }
    assert told == set(MAY_TELL_THE_TIME)


MAY_BUILD_PATTERNS = {"server/text/special_tokens.py": "escaped, out of the model's own tokens"}
WORKERS_AND_SERVER = ("server/", "worker/", "prefill/", "decode/", "transport/", "engine/")


def test_no_pattern_comes_from_outside() -> None:
    built = {
        name
        for name, path in product_files()
        if name.startswith(WORKERS_AND_SERVER)
        for node in nodes_of(path)[ast.Call]
        if isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and re.fullmatch(r"(?:re|regex)\.\w+", ast.unparse(node.func))
        and not (node.args and isinstance(node.args[0], ast.Constant))
        and ast.unparse(node.func) != "re.escape"
    }
    assert built == set(MAY_BUILD_PATTERNS)


def test_no_generator_lives_between_two_tasks() -> None:
    """An abandoned async generator is finalized by another task. Only context managers, which the
    entering task always leaves, may be written as generators."""
    generators = [
        f"{name}:{node.lineno} {node.name}"
        for name, path in product_files()
        if name.startswith(WORKERS_AND_SERVER)
        for node in nodes_of(path)[ast.AsyncFunctionDef]
        if any(isinstance(inner, ast.Yield) for inner in own_nodes(node))
        and "asynccontextmanager" not in map(ast.unparse, node.decorator_list)
    ]
    assert generators == []


def own_nodes(function: ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without nested functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


SPEAKS_TO_REDIS = "transport/redis_calls.py"
"""Its library requires an anyio stream, which is one of Trio's here."""
OTHER_WAYS = ("zmq.asyncio", "zmq.green", "zmq.eventloop", "zmq_anyio", "asyncio", "anyio")


def test_zeromq_is_awaited_in_our_own_way_only() -> None:
    wrong = [
        f"{name}:{line} {module}"
        for name, path in product_files()
        for line, module in imports_of(path)
        if module.startswith(OTHER_WAYS) and name != SPEAKS_TO_REDIS
    ]
    assert wrong == []


def test_libraries_whose_inside_is_touched_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in ("trio", "hypercorn", "quart", "quart-trio"):
        assert f"{name}=={version(name)}" in project["dependencies"]
