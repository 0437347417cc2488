"""Tests of the repository's own rules: size limits, which package may import which, and forbidden
code.

They read the sources as text and syntax trees, and import nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "triolet",
    "transport",
    "store",
    "engine",
    "worker",
    "prefill",
    "decode",
    "server",
    "simulation",
    "ops",
    "loadtest",
    "tools",
)

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ATTRIBUTES = 20
MAX_METHODS = 20
MAX_FOLDER_FILES = 25

MAY_IMPORT: dict[str, frozenset[str]] = {
    "triolet": frozenset(),
    "transport": frozenset({"triolet"}),
    "store": frozenset({"triolet"}),
    "engine": frozenset({"triolet", "store"}),
    "worker": frozenset({"triolet", "transport", "store", "engine"}),
    "prefill": frozenset({"triolet", "transport", "engine", "worker"}),
    "decode": frozenset({"triolet", "transport", "engine", "worker"}),
    "server": frozenset({"triolet", "transport", "store"}),
    # The simulator runs production logic of every folder.
    "simulation": frozenset(
        {"triolet", "transport", "store", "engine", "worker", "prefill", "decode", "server"}
    ),
    # The CLI starts each role's entry point inside the command of that role.
    "ops": frozenset({"triolet", "transport", "store"}),
    "loadtest": frozenset(),
    "tools": frozenset(),
    # Benchmarks of engine and wire run engine and workers; the front's benchmark speaks the worker
    # protocol, and the queue's asks the server's own queue.
    "loadtest/bench": frozenset(ROOMS) - {"loadtest", "tools"},
    # Programs for a rented GPU measure the engine and run campaigns; pictures need a server.
    "tools/gpu_lease": frozenset({"triolet", "transport", "engine", "loadtest"}),
    "tools/screenshot.py": frozenset({"loadtest"}),
    # Starts processes of every role, as the supervisor does.
    "loadtest/harness": frozenset({"triolet", "transport", "ops"}),
    # So does loadtest, in virtual time and as processes with a simulated device.
    "loadtest/overload": frozenset(ROOMS) - {"loadtest", "tools"},
    # Runs the production rollout judge, also on simulated fleets.
    "loadtest/rollouts": frozenset({"triolet", "transport", "server", "simulation", "ops"}),
    # Runs rollouts with real processes and simulated devices.
    "loadtest/rollout_bench": frozenset(ROOMS) - {"loadtest", "tools"},
}
ENTRY_POINTS = {
    # The command `triolet`, after checking that `ops` is Triolet's own.
    ("triolet/entry.py", "ops"),
    ("ops/cli/commands.py", "prefill"),
    ("ops/cli/commands.py", "decode"),
    ("ops/cli/commands.py", "server"),
    # Checks a model before a start, without torch.
    ("ops/models/model_directory.py", "engine"),
    # The server's own readers check what a server reads of a model directory.
    ("ops/models/model_directory.py", "server"),
    ("ops/cli/check_places.py", "engine"),
    # A probe computes like a worker.
    ("ops/cli/probe_command.py", "worker"),
    # Reads a model's sampling defaults like the server, so that an import refuses what it would.
    ("ops/models/importing.py", "server"),
}

HOMES: dict[str, tuple[str, ...]] = {
    # Libraries that only one place may use, and which.
    "zmq": ("transport/zmq_", "loadtest/bench/wire_sockets.py"),
    "hypercorn": ("server/edge/", "ops/control/admin.py"),
    "flash_attn": ("engine/attention/flash",),
    "triton": ("engine/gpu/",),
    "msgpack": ("transport/codec.py", "server/text/pieces.py"),
    "llguidance": ("triolet/grammar.py",),
    "gguf": ("engine/gguf_weights.py",),
    "cryptography": ("ops/audit/heads.py", "store/signatures.py"),
    "dns": ("server/membership/dns_source.py",),
    "ray": ("ops/targets/ray_",),
    "coredis": ("transport/redis_calls.py",),
    "prometheus_client": ("server/metrics",),
    "locust": ("loadtest/",),
    "yaml": ("triolet/slo/objectives.py", "ops/slo_rules.py"),
}
NEVER = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
SAFE_YAML = {"yaml.safe_load_all", "yaml.safe_dump"}
IMPURE = {"trio", "zmq", "socket", "torch", "time", "threading", "anyio", "asyncio"}


@cache
def listed() -> tuple[Path, ...]:
    """Return the Python files that git tracks or would add."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return tuple(ROOT / name for name in found if (ROOT / name).exists())


def sources(*rooms: str) -> list[Path]:
    """Return the Python files of these top folders."""
    return [path for path in listed() if path.relative_to(ROOT).parts[0] in rooms]


@cache
def sources_below(place: str) -> frozenset[Path]:
    """Return the Python files of a folder and of those in it."""
    return frozenset(path for path in listed() if path.is_relative_to(ROOT / place))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> dict[type[ast.AST], list[Any]]:
    """Return all nodes of a file by type, each in the order of a walk.

    A walk takes two thirds of the time of the parse, and a dozen tests look for some type of node.
    """
    kinds: dict[type[ast.AST], list[Any]] = defaultdict(list)
    for node in ast.walk(parsed(path)):
        kinds[type(node)].append(node)
    return kinds


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = nodes_of(path)
    return kinds[ast.FunctionDef] + kinds[ast.AsyncFunctionDef]


def called_name(call: ast.Call) -> str:
    """Return the last name of a call, `put` of `self.queue.put()`; "" if it has none."""
    function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return (line, module) of every absolute import."""
    kinds = nodes_of(path)
    found = [(node.lineno, alias.name) for node in kinds[ast.Import] for alias in node.names]
    for node in kinds[ast.ImportFrom]:
        if node.level == 0 and node.module:
            found.append((node.lineno, node.module))
    return found


def test_files_are_short() -> None:
    lines = {p: len(text_of(p).splitlines()) for p in sources(*ROOMS, "tests")}
    too_long = {shown(p): n for p, n in lines.items() if n > MAX_FILE_LINES}
    assert not too_long


def test_folders_are_small() -> None:
    sizes = Counter(shown(path.parent) for path in sources(*ROOMS) if path.name != "__init__.py")
    too_large = {folder: count for folder, count in sizes.items() if count > MAX_FOLDER_FILES}
    assert not too_large


def test_functions_are_short() -> None:
    too_long = [
        f"{shown(path)}:{node.lineno} {node.name}: {length} lines"
        for path in sources(*ROOMS, "tests")
        for node in functions_of(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not too_long


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Return names annotated in the class body or assigned to self."""
    names = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for sub in ast.walk(node):
        if (
            isinstance(sub, ast.Attribute)
            and isinstance(sub.ctx, ast.Store)
            and isinstance(sub.value, ast.Name)
            and sub.value.id == "self"
        ):
            names.add(sub.attr)
    return names


RECORDS = {"dataclass", "Struct", "Part", "Frame", "AttemptFrame", "BaseModel", "NamedTuple"}


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class only declares fields (config, wire schema, request schema)."""
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    has_init = any(isinstance(i, ast.FunctionDef) and i.name == "__init__" for i in node.body)
    return not has_init and any(word in mark for mark in marks for word in RECORDS)


def test_classes_are_small() -> None:
    too_large = []
    for path in sources(*ROOMS):
        for node in nodes_of(path)[ast.ClassDef]:
            methods = sum(isinstance(i, ast.FunctionDef | ast.AsyncFunctionDef) for i in node.body)
            attributes = len(own_attributes(node))
            if methods > MAX_METHODS or (attributes > MAX_ATTRIBUTES and not is_record(node)):
                too_large.append(
                    f"{shown(path)} {node.name}: {attributes} attrs, {methods} methods"
                )
    assert not too_large


def test_package_files_hold_no_code() -> None:
    with_code = [
        shown(path)
        for path in sources(*ROOMS)
        if path.name == "__init__.py"
        and any(
            not isinstance(node, ast.ImportFrom | ast.Import)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
            for node in parsed(path).body
        )
    ]
    assert not with_code


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    wrong = []
    for path in sources(room):
        part = "/".join(path.relative_to(ROOT).parts[:2])
        allowed = MAY_IMPORT.get(part, MAY_IMPORT[room])
        for line, module in imports_of(path):
            top = module.split(".")[0]
            if top in ROOMS and top != room and top not in allowed:
                if (shown(path), top) in ENTRY_POINTS:
                    continue
                wrong.append(f"{shown(path)}:{line} imports {module}")
    assert not wrong


Floors: TypeAlias = tuple[tuple[str, ...], ...]
"""A folder may import its own floor and those before it, including types."""
SERVER_FLOORS: Floors = (
    (
        "server/contract",
        "server/membership",
        "server/peers",
        "server/slo",
        "server/text",
        "server/text/tool_forms",
        "server/tenants",
    ),
    ("server/scheduling", "server/cache"),
    ("server/metrics", "server/rollouts"),
    (
        "server/api",
        "server/api/openai",
        "server/api/anthropic",
        "server/api/ollama",
        "server/api/operations",
    ),
    ("server/jobs",),
    ("server/document", "server/edge"),
    ("server",),
)
OPS_FLOORS: Floors = (
    ("ops", "ops/settings", "ops/audit", "ops/rollouts"),
    ("ops/models",),
    ("ops/supervisor",),
    ("ops/control", "ops/targets"),
    ("ops/cli",),
)


def module_file(module: Path) -> Path | None:
    """Return the file of a module or package of this tree; None if it is not of this tree."""
    files = (module.with_suffix(".py"), module / "__init__.py")
    return next((file for file in files if file in sources_below(".")), None)


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Return the files of this tree that a file imports, including imports for types."""
    kinds = nodes_of(path)
    found = {
        module_file(ROOT.joinpath(*alias.name.split(".")))
        for node in kinds[ast.Import]
        for alias in node.names
    }
    for node in kinds[ast.ImportFrom]:
        base = path.parents[node.level - 1] if node.level else ROOT
        base = base.joinpath(*(node.module or "").split("."))
        found |= {module_file(base / alias.name) or module_file(base) for alias in node.names}
    return frozenset(file for file in found - {path} if file is not None)


def folder_imports(room: str) -> dict[tuple[str, str], str]:
    """Return one import for each pair of a top folder's subfolders of which one needs the other."""
    return {
        (shown(path.parent), shown(target.parent)): f"{shown(path)} imports {shown(target)}"
        for path in sources_below(room)
        for target in imported_files(path)
        if target.parent != path.parent and target in sources_below(room)
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return cycles until none is left after removing one step of each; each ends where it
    starts."""
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            graph[circle[0]].remove(circle[1])
            found.append(circle)
        else:
            return found


def test_circles_are_found() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}
    found = {frozenset(circle) for circle in circles(graph)}
    assert found == {frozenset("abc"), frozenset("d")}


def test_no_imports_of_files_go_in_a_circle() -> None:
    files = {path for place in ROOMS for path in sources_below(place)}
    graph = {shown(path): set(map(shown, imported_files(path) & files)) for path in files}
    found = [" imports ".join(circle) for circle in circles(graph)]
    assert not found, "\n".join(found)


# engine/ has both its lowest files, such as the KV pool, and its highest in its root.
@pytest.mark.parametrize("room", sorted({*ROOMS} - {"engine"}))
def test_no_imports_of_folders_go_in_a_circle(room: str) -> None:
    reasons = folder_imports(room)
    graph: dict[str, set[str]] = defaultdict(set)
    for folder, needed in reasons:
        graph[folder].add(needed)
    found = [
        "\n".join([" needs ".join(circle), *map(reasons.__getitem__, pairwise(circle))])
        for circle in circles(graph)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("room", "floors"), [("server", SERVER_FLOORS), ("ops", OPS_FLOORS)])
def test_folders_import_their_own_floor_and_those_below(room: str, floors: Floors) -> None:
    floor = {folder: level for level, row in enumerate(floors) for folder in row}
    pairs = folder_imports(room)
    assert {folder for pair in pairs for folder in pair} <= floor.keys()
    upstairs = {pair: at for pair, at in pairs.items() if floor[pair[1]] > floor[pair[0]]}
    assert not upstairs


def test_imports_inside_a_room_are_relative() -> None:
    wrong = [
        f"{shown(path)}:{line} imports {module}"
        for path in sources(*ROOMS)
        for line, module in imports_of(path)
        if module.split(".")[0] == path.relative_to(ROOT).parts[0]
    ]
    assert not wrong


def test_libraries_stay_in_their_homes() -> None:
    wrong = [
        f"{shown(path)}:{line} imports {module}"
        for path in sources(*ROOMS)
        for line, module in imports_of(path)
        if (homes := HOMES.get(module.split(".")[0])) and not shown(path).startswith(homes)
    ]
    assert not wrong


def test_nothing_unsafe_is_ever_loaded() -> None:
    wrong = [
        f"{shown(path)}:{line} imports {module}"
        for path in sources(*ROOMS)
        for line, module in imports_of(path)
        if module.split(".")[0] in NEVER
    ]
    for path in sources(*ROOMS):
        wrong += [
            f"{shown(path)}:{node.lineno} {name}"
            for node in nodes_of(path)[ast.Call]
            if called_name(node) in {"load", "eval", "exec", "inf"}
            and (name := ast.unparse(node.func)) in {"torch.load", "eval", "exec", "math.inf"}
        ]
    wrong += [
        f"{name}:{call.lineno} {used}"
        for name in HOMES["yaml"]
        for call in nodes_of(ROOT / name)[ast.Call]
        if (used := ast.unparse(call.func)).startswith("yaml.") and used not in SAFE_YAML
    ]
    assert not wrong


SANS_IO_FOLDERS: dict[str, tuple[str, ...]] = {
    # Everything in a folder is pure, except the files that move bytes and time.
    "triolet": (),
    "transport": (
        "address.py",
        "memory_network.py",
        "memory_pipe.py",
        "redis_calls.py",
        "registrations.py",
        "zmq_",
    ),
    "worker": ("probe", "entry.py", "health.py", "local_engine.py", "worker_loop.py"),
    "prefill": ("links.py", "worker.py"),
    "decode": ("worker.py",),
    "server/tenants": (
        "memory_store.py",
        "opening.py",
        "quotas.py",
        "redis_",
        "tenancy.py",
        "usage_ledger.py",
    ),
    "server/slo": (),
    "triolet/slo": (),
    "server/scheduling": ("control_link.py", "delivery.py", "links.py"),
    "server/membership": ("dns_source.py", "members.py", "redis_source.py"),
    "ops/rollouts": (),
}
SANS_IO = (
    "engine/batch.py",
    "engine/gpu/arena.py",
    "engine/gpu/buckets.py",
    "engine/gpu/decode_rows.py",
    "engine/block_ledger.py",
    "engine/pace.py",
    "engine/philox.py",
    "ops/control/controller.py",
    "ops/control/model_states.py",
    "ops/control/models.py",
    "ops/control/operations.py",
    "ops/control/outlook.py",
    "ops/control/residency.py",
    "ops/supervisor/plan.py",
    "ops/supervisor/restart_policy.py",
    "ops/supervisor/rolling.py",
    "server/contract/generation.py",
    "server/cache/store.py",
    *(
        f"{folder}/{path.name}"
        for folder, moving in SANS_IO_FOLDERS.items()
        for path in sorted((ROOT / folder).glob("*.py"))
        if not path.name.startswith(("__init__", *moving))
    ),
)


@pytest.mark.parametrize("name", SANS_IO)
def test_files_that_decide_do_no_io(name: str) -> None:
    wrong = [m for _, m in imports_of(ROOT / name) if m.split(".")[0] in IMPURE]
    assert not wrong


@pytest.mark.slow
def test_deciding_loads_neither_torch_nor_trio_nor_zmq() -> None:
    cores = (
        "decode.core, prefill.core, server.scheduling.requests, ops.supervisor.plan, "
        "ops.supervisor.restart_policy, engine.preflight.check"
    )
    loaded = "[m for m in ('torch', 'trio', 'zmq') if m in sys.modules]"
    script = f"import sys, {cores}; print({loaded})"
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert finished.stdout.strip() == "[]"


def test_every_channel_and_queue_has_a_bound() -> None:
    wrong = []
    for path in sources(*ROOMS):
        for node in nodes_of(path)[ast.Call]:
            called = called_name(node)
            arguments = (*node.args, *(keyword.value for keyword in node.keywords))
            if called == "open_memory_channel" and any("inf" in ast.unparse(a) for a in arguments):
                wrong.append(f"{shown(path)}:{node.lineno} unbounded channel")
            if called in {"Queue", "SimpleQueue"} and not arguments:
                wrong.append(f"{shown(path)}:{node.lineno} unbounded queue")
    assert not wrong


CONFIGS = sorted((ROOT / "triolet" / "config").glob("*.py"))


def read_in(path: Path) -> set[str]:
    """Return the attributes read in a file; in config files, only by methods. What only a value's
    validation reads does not count."""
    if path not in CONFIGS:
        readers = nodes_of(path)[ast.Attribute]
    else:
        methods = (f for f in nodes_of(path)[ast.FunctionDef] if f.name != "__post_init__")
        readers = [node for method in methods for node in ast.walk(method)]
    return {
        node.attr
        for node in readers
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_setting_is_heeded() -> None:
    read = set().union(*map(read_in, sources(*ROOMS)))
    settings = {
        item.target.id
        for path in CONFIGS
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assert len(settings) > 50
    assert settings <= read, settings - read


MARKS = ("TODO", "FIXME", "XXX", "NotImplementedError")


def test_nothing_is_left_for_later() -> None:
    wrong = [
        f"{shown(path)}: {mark}"
        for path in sources(*ROOMS, "tests")
        if path != Path(__file__)
        for mark in MARKS
        if mark in text_of(path)
    ]
    assert not wrong
