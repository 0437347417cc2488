"""Tests that the commands in README.md and docs/ work: each page runs in one shell beside a running
fleet. Exceptions are listed with reasons."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pytest

from ops.models.known import SMOLLM2
from ops.models.model_directory import demo_model_path
from tests.adapters import write_adapter
from tests.gguf_files import byte_vocabulary, write_tiny
from tests.house.test_layout import ROOT
from tests.store.registry.docker_registry import running_registry

from .reader import Reader
from .shown import OTHERS, PAGES, SHELL, files, languages, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from .shown import Shown

OPERATIONS: Final = "docs/operations"
ADAPTERS: Final = f"{OPERATIONS}/adapters.md"
AUTO: Final = f"{OPERATIONS}/auto.md"
CONFIGURATION: Final = "docs/configuration.md"
ROLLOUTS: Final = "docs/ROLLOUTS.md"
SIGNATURES: Final = f"{OPERATIONS}/signatures.md"
SCENES: Final = {
    "one model": (
        "README.md",
        "docs/install.md",
        "docs/SECURITY.md",
        CONFIGURATION,
        f"{OPERATIONS}/start.md",
        f"{OPERATIONS}/health.md",
        f"{OPERATIONS}/alerts.md",
        f"{OPERATIONS}/logs.md",
        "docs/SLO.md",
        f"{OPERATIONS}/slo_rules.md",
        "docs/operations.md",
    ),
    "the first hour": (
        "docs/first_hour.md",
        f"{OPERATIONS}/audit.md",
        f"{OPERATIONS}/dashboard.md",
        "docs/AUDIT.md",
        f"{OPERATIONS}/batches.md",
        f"{OPERATIONS}/proxy.md",
    ),
    "tenants": ("docs/TENANTS.md", f"{OPERATIONS}/usage.md", f"{OPERATIONS}/link_keys.md"),
    "several models": (
        f"{OPERATIONS}/models.md",
        f"{OPERATIONS}/residency.md",
        f"{OPERATIONS}/add_models.md",
        f"{OPERATIONS}/restart.md",
        ROLLOUTS,
        f"{OPERATIONS}/rollouts.md",
        f"{OPERATIONS}/rollout_gates.md",
        f"{OPERATIONS}/switch.md",
        AUTO,
    ),
    "adapters": (ADAPTERS, f"{OPERATIONS}/load_adapters.md"),
    "the store": (
        f"{OPERATIONS}/store.md",
        f"{OPERATIONS}/golden.md",
        SIGNATURES,
    ),
    "a registry": (f"{OPERATIONS}/registry.md",),
    "several machines": (
        f"{OPERATIONS}/machines.md",
        f"{OPERATIONS}/hosts.md",
        f"{OPERATIONS}/drain.md",
        f"{OPERATIONS}/scale.md",
    ),
    "not here": ("docs/gpu.md", f"{OPERATIONS}/gpus.md", f"{OPERATIONS}/drills.md"),
}
"""Pages read by one reader, in order. A page's fleet runs until another one starts."""
RUN_ELSEWHERE: Final = {
    "docs/API.md": "tests/end_to_end/test_api_document.py",
    "docs/CLIENTS.md": "tests/end_to_end/clients",
    "docs/operations/gateway.md": "tests/end_to_end/gateway",
    "docs/operations/membership.md": "tests/end_to_end/test_membership.py",
    "docs/operations/control.md": "tests/ops/control/test_several_hosts.py",
    "docs/operations/kubernetes.md": "tests/kubernetes",
    "docs/operations/ray.md": "tests/end_to_end/ray/test_ray_document.py",
}
NOT_RUN: Final = {
    "installs, tests or measures for minutes": (
        *("make install ", "make test ", "make faults", "make soak "),
        *('make gpu-lease ARGS="pack ', 'make gpu-lease ARGS="run --rehearse '),
    ),
    "needs a GPU": (
        'make gpu-lease ARGS="run --part ',
        *("triolet doctor MODEL --device cuda", "triolet serve MODEL --device cuda"),
    ),
    "installs packages for minutes; `make wheel` installs the wheel": (
        *("python3 -m venv /opt/", "/opt/triolet/bin/pip install ", "pip wheel "),
        "pip install 'triolet[gpu]'",
    ),
    "needs root, and systemd": (
        *("useradd ", "install -d -o triolet ", "sudo -u triolet "),
        *("install -m 644 ops/deploy/triolet.service ", "systemctl "),
    ),
    "needs an engine for containers": (
        *("make container ", "export STORAGE_DRIVER=", "podman "),
        *("docker compose ", "TRIOLET_PIP_CONF=$HOME/.config/pip/pip.conf docker compose "),
    ),
    "needs a Prometheus that has scraped for half a minute": (
        *("kill -STOP ", "curl -s localhost:9090/", "kill -CONT "),
    ),
    "needs another machine": ("ssh ",),
    "follows a rollout to its end": ("triolet rollout status chat --watch",),
    "needs a Ray cluster, or a Redis with the numbers of a fleet on Kubernetes": (
        *("triolet scale decode=3 --zone ", "triolet scale chat.decode=3 --on "),
        "triolet fleet status --on ray",
    ),
}
"""Commands that no test runs, by their start, and why."""
ADMIN: Final = "curl --unix-socket $XDG_RUNTIME_DIR/triolet-*/admin.sock"
PROMISES: Final = {
    "curl -s localhost:8000/health/ready": '"status":"ready"',
    "curl -s localhost:8000/admin/slo": '"object":"slo_report"',
    "curl -N ": "data: [DONE]",
    'echo "What is 2 + 3?" |': "2 + 3 = 5",
    "triolet tenant list": "alice",
    "triolet audit prove 2": '"index":2',
    "triolet drain decode-0": "decode-0 has exited",
    "triolet restart": "done:",
    "triolet rollout start": "preparing",
    "triolet rollout rollback": "rolled_back",
    f"{ADMIN} -X POST http://localhost/admin/rollouts": '"phase":"rolled_back"',
    "triolet scale": "done:",
    "triolet model verify": "all match their digests",
    'grep \'"client_request_id"': "request_ended",
    "grep 'THE-REQUEST-ID'": "attempt_ended",
}
"""Expected output of commands, by their start."""
KEY_ID: Final = re.compile(r"ed25519:[0-9a-f]{64}")
NEEDED: Final = ("bash", "curl", "make", "openssl")
"""Programs that the documents use besides Triolet's."""


def make_models(reader: Reader) -> None:
    """Put the demo model where the documents expect models, and a small file for SmolLM2."""
    models = reader.home / "models"
    models.mkdir()
    for name in ("Llama-3.2-1B-Instruct", "Coder", "Qwen2.5-Coder-0.5B-Instruct"):
        (models / name).symlink_to(demo_model_path())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    words = byte_vocabulary(**{"tokenizer.chat_template": template})
    write_tiny(models / "Llama-3.2-1B-Instruct-Q4_K_M.gguf", vocabulary=words)
    kept = reader.home / ".local/share/triolet/models/smollm2" / SMOLLM2.file_name
    kept.parent.mkdir(parents=True)
    shutil.copyfile(models / "Llama-3.2-1B-Instruct-Q4_K_M.gguf", kept)
    os.truncate(kept, SMOLLM2.file_bytes)


def make_deploy_folder(reader: Reader) -> None:
    shutil.copytree(ROOT / "ops" / "deploy", reader.folder / "ops" / "deploy")


def write_config(reader: Reader, page: str) -> None:
    """Write the first file of a page as the triolet.toml that its commands use."""
    (reader.folder / "triolet.toml").write_text(reader.here(files(page)[0]))


def import_models(reader: Reader) -> None:
    for name in ("chat", "code", "chat-small", "chat-large"):
        typed(reader, f"triolet model import demo --name {name} --tag v1")
        typed(reader, f"triolet model alias {name}@stable {name}:v1")


def make_and_import_models(reader: Reader) -> None:
    make_models(reader)
    import_models(reader)


def make_adapters(reader: Reader) -> None:
    import_models(reader)
    write_config(reader, ADAPTERS)
    for path in (reader.folder / "srv/adapters/chat-sql", reader.home / "adapters/chat-fr"):
        write_adapter(path, demo_model_path(), 1, ("q_proj",))


def ask_with_an_id(reader: Reader) -> None:
    """Send the request of the client on the page about logs, and log where the page looks."""
    reader.stop()
    typed(reader, "triolet serve demo 2>log")
    body = """-d '{"prompt": "Hello", "max_tokens": 1}' -H 'content-type: application/json'"""
    typed(reader, f"curl -s {reader.url}/v1/completions {body} -H 'x-request-id: THE-ID'")
    typed(reader, 'until grep \'"client_request_id": "THE-ID"\' log >ended; do sleep 0.05; done')
    ended = json.loads((reader.folder / "ended").read_text())
    reader.substitutes["THE-REQUEST-ID"] = ended["request_id"]


def fill_stores(reader: Reader) -> None:
    """Put a version into the store that a page names, and sampling defaults where an import reads
    them."""
    (reader.folder / "sampling.json").write_text('{"temperature": 0.2}')
    typed(
        reader, f"triolet model import demo --name chat --tag v2 --store {reader.folder}/srv/models"
    )


def run_registry(reader: Reader) -> None:
    registry = reader.stack.enter_context(running_registry(reader.folder / "registry"))
    reader.substitutes["registry.example"] = registry.host
    typed(reader, "PASSWORD=password")


def name_our_key(reader: Reader) -> None:
    (theirs,) = {name for one in shown(SIGNATURES) for name in KEY_ID.findall(one.text)}
    reader.substitutes[theirs] = "$(triolet model key release.key)"


def wait_added(reader: Reader) -> None:
    """Wait for a page's order that precedes another one for the same model."""
    (order,) = re.findall(r'"id": ?"(\w+)"', reader.said)
    ask = f"{ADMIN} -s http://localhost/admin/operations/{order}"
    typed(reader, f"until {ask} | grep -q '\"done\"'; do sleep 0.05; done")


def wait_rolled_back(reader: Reader) -> None:
    """Wait until the rollout of the previous page has left one version."""
    ended = "triolet rollout status chat --json | grep -q '\"is_over\":true'"
    typed(reader, f"until {ended}; do sleep 0.05; done")


def serve_a_named_model(reader: Reader) -> None:
    reader.stop()
    typed(reader, "triolet serve chat=demo")


def typed(reader: Reader, command: str) -> None:
    """Type a command that a page assumes."""
    problem = reader.type(command)
    assert not problem, f"{command}: {problem}"


BEFORE: Final[dict[str, Callable[[Reader], None]]] = {
    "README.md": make_models,
    "docs/install.md": make_deploy_folder,
    CONFIGURATION: lambda reader: write_config(reader, CONFIGURATION),
    f"{OPERATIONS}/logs.md": ask_with_an_id,
    f"{OPERATIONS}/models.md": make_and_import_models,
    f"{OPERATIONS}/add_models.md": lambda reader: typed(reader, "triolet model drop code"),
    f"{ADMIN} -X DELETE": wait_added,
    ROLLOUTS: lambda reader: typed(
        reader,
        "triolet model import ~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf --name chat --tag v2",
    ),
    f"{OPERATIONS}/rollouts.md": wait_rolled_back,
    f"{OPERATIONS}/switch.md": wait_rolled_back,
    AUTO: lambda reader: write_config(reader, AUTO),
    ADAPTERS: make_adapters,
    f"{OPERATIONS}/store.md": fill_stores,
    SIGNATURES: name_our_key,
    f"{OPERATIONS}/registry.md": run_registry,
    # Beside the processes of several machines started by the previous page.
    f"{OPERATIONS}/drain.md": lambda reader: typed(reader, "triolet serve demo"),
    "triolet scale chat.decode": serve_a_named_model,
}
"""What a page, or a command of one, assumes."""


def is_run(one: Shown) -> bool:
    return not one.text.startswith(sum(NOT_RUN.values(), ()))


def prepare(reader: Reader, text: str) -> None:
    for start, make in BEFORE.items():
        if text.startswith(start):
            make(reader)


def problem_of(reader: Reader, one: Shown) -> str:
    """Run what a page shows; return the problem, or an empty text."""
    prepare(reader, one.text)
    if problem := reader.read(one):
        return f"{one}\n{problem}"
    words = [words for start, words in PROMISES.items() if one.text.startswith(start)]
    missing = [promised for promised in words if promised not in reader.said]
    return f"{one}\nprints no {missing}: {reader.said}" if missing else ""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "scene",
    # A tenant in a minute is a promise; no other test shows it on a fleet.
    [pytest.param(scene, marks=[pytest.mark.promise] * (scene == "tenants")) for scene in SCENES],
)
def test_every_command_of_the_documents_works(scene: str) -> None:
    if absent := [program for program in NEEDED if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(absent)}: not installed")
    problems = []
    with TemporaryDirectory(prefix="docs-") as folder:
        reader = Reader(Path(folder))
        try:
            for page in SCENES[scene]:
                typed(reader, f"cd {folder}")
                prepare(reader, page)
                found = [problem_of(reader, one) for one in filter(is_run, shown(page))]
                problems += [problem for problem in found if problem]
            reader.stop()
        finally:
            reader.close()
    assert not problems, "\n\n".join(problems)


def test_every_page_is_read_by_one_reader() -> None:
    read = sorted(page for pages in SCENES.values() for page in pages)
    assert read == sorted(page for page in PAGES if shown(page) and page not in RUN_ELSEWHERE)


def test_every_block_says_in_which_language_it_is_unless_a_shell_reads_it() -> None:
    assert {kind for page in PAGES for kind in languages(page)} <= {*SHELL, *OTHERS}


def test_every_entry_of_a_table_is_of_something_that_is_shown() -> None:
    pages = [page for scene in SCENES.values() for page in scene]
    texts = [*pages, *(one.text for page in pages for one in shown(page))]
    entries = [*sum(NOT_RUN.values(), ()), *PROMISES, *BEFORE]
    assert not [entry for entry in entries if not any(text.startswith(entry) for text in texts)]
