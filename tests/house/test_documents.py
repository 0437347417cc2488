"""Tests that the documents name only existing files, metrics, options and make targets.

Only names are checked; people must check the rest. protocol.md has its own test beside the
protocol.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from ops.cli import app
from server.metrics.exposition import merging
from server.metrics.metrics import Metrics
from server.scheduling.status import FleetStatus, OverloadStatus
from server.tenants.tenancy import Tenancy

from .configuration_page import tables

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = DOCS / "configuration.md"
METRICS = sorted((DOCS / "operations").glob("metrics*.md"))
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in DOCUMENTS]
TOUR = [DOCS / "ARCHITECTURE.md", *sorted((DOCS / "architecture").glob("*.md"))]

FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
LINK_TEXT = re.compile(r"\[([^\]\n]+)\]\(")
SOURCE_FILE = re.compile(r"[\w./-]+\.(?:py|js|css|html|md|toml|txt)\b")
ROOMS = (
    "triolet|transport|store|engine|worker|prefill|decode|server|simulation|ops|loadtest|tests|docs"
)
MADE = {"tenants.toml", "triolet.toml"}
"""Files that commands or operators create."""
MAX_PAGE_WORDS = 1000
REFERENCES = {"metrics.md", "configuration.md"}
"""Pages that consist of one long table."""
METHOD = re.compile(r"([A-Z][a-z]\w+)\.(_?[a-z]\w*)")
PLACE = re.compile(rf"(?:{ROOMS})(?:/\w+)*/?")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
METRIC = re.compile(r"\btriolet_[a-z_]+")
HISTOGRAM_SAMPLE = re.compile(r"_(?:bucket|count|sum)$")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_in(text: str) -> list[str]:
    """Return every line of fenced code and every code span."""
    lines = [line for block in FENCED.findall(text) for line in block.splitlines()]
    return lines + SPAN.findall(FENCED.sub("", text))


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def repository() -> tuple[str, ...]:
    """Return the files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).exists())


@cache
def endings() -> frozenset[str]:
    """Return every suffix of a path by which a file of the repository may be named."""
    return frozenset(
        "/".join(parts[start:])
        for parts in (name.split("/") for name in repository())
        for start in range(len(parts))
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(FENCED.sub("", text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("page", PAGES)
def test_every_source_file_that_is_named_exists(page: Path) -> None:
    text = text_of(page)
    named = {
        word
        for code in (*code_in(text), *LINK_TEXT.findall(text))
        for word in SOURCE_FILE.findall(code)
        if not word.startswith(("build/", "~", "/"))
    }
    missing = sorted(name for name in named - MADE if name not in endings())
    assert not missing


def test_a_page_has_one_subject() -> None:
    pages = (page for page in DOCUMENTS if page.parent.name in {"operations", "architecture"})
    lengths = {page.name: len(text_of(page).split()) for page in pages}
    assert {
        name for name, words in lengths.items() if words > MAX_PAGE_WORDS
    } == REFERENCES & lengths.keys()


@cache
def named_in_source() -> tuple[frozenset[str], frozenset[str]]:
    """Return the classes of every top folder, and all names that are called, annotated or
    assigned."""
    rooms = ROOMS.removesuffix("|tests|docs").split("|")
    names = (name for name in repository() if name.startswith(tuple(f"{room}/" for room in rooms)))
    texts = [text_of(ROOT / name) for name in names if name.endswith((".py", ".js"))]
    classes, members = re.compile(r"\bclass (\w+)"), re.compile(r"\b(\w++)\s*+[(:=]")
    return (
        frozenset(name for text in texts for name in classes.findall(text)),
        frozenset(name for text in texts for name in members.findall(text)),
    )


@pytest.mark.parametrize("page", TOUR, ids=lambda page: page.stem)
def test_every_method_that_is_named_exists(page: Path) -> None:
    named = {match.groups() for span in code_in(text_of(page)) if (match := METHOD.fullmatch(span))}
    classes, members = named_in_source()
    missing = [
        f"{owner}.{name}"
        for owner, name in sorted(named)
        if owner not in classes or name not in members
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_every_folder_that_is_named_exists(page: Path) -> None:
    named = {span for span in SPAN.findall(text_of(page)) if PLACE.fullmatch(span) and "/" in span}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = {
        match[1]
        for code in code_in(text_of(page))
        if (match := re.match(r"make ([a-z0-9-]+)", code.strip()))
    }
    assert named <= targets


def exposed_metrics() -> set[str]:
    """Return the names of all our metrics, as Prometheus knows them."""
    nothing = FleetStatus(
        workers=(),
        is_ready=False,
        is_draining=False,
        queued=0,
        running=0,
        max_model_len=1,
        received=0,
        accepted=0,
        rejected={},
        ended={},
        retries_left=0.0,
        quarantined=0,
        overload=OverloadStatus(guard_tokens=1.0, tokens_per_s=1.0),
        queued_by_class={},
        queues=(),
    )
    metrics = Metrics("model", "none")
    metrics.watch(lambda: nothing, lambda: 0)
    metrics.tenants.watch(lambda: Tenancy().report)
    merged = "".join(merging({"server-0": metrics.exposition().decode(), "server-1": None}))
    families = re.findall(r"^# TYPE (\S+)", merged, re.MULTILINE)
    return {name for name in families if name.startswith("triolet_")}


def test_the_operator_is_told_of_every_metric_and_of_no_other() -> None:
    # Only in a table's first column, so that a grep pattern is not checked.
    text = "".join(map(text_of, METRICS))
    rows = re.findall(r"^\| (`triolet_[^|]+)\|", text, re.MULTILINE)
    described = {name for row in rows for name in METRIC.findall(row)}
    assert described == exposed_metrics()


def test_metrics_named_elsewhere_exist() -> None:
    exposed = exposed_metrics()
    for page in DOCUMENTS:
        spans = {span for span in SPAN.findall(text_of(page)) if METRIC.fullmatch(span)}
        assert {HISTOGRAM_SAMPLE.sub("", span) for span in spans} <= exposed


def options() -> Iterator[tuple[str, str, Any]]:
    """Yield command, option and default of everything on the command line."""
    waiting: list[tuple[str, Any]] = [("triolet", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        waiting += getattr(command, "commands", {}).items()
        for parameter in getattr(command, "params", ()):
            if parameter.opts[0].startswith("--") and not parameter.hidden:
                yield name, parameter.opts[0], parameter.default


@cache
def known_options() -> frozenset[str]:
    return frozenset(option for _, option, _ in options())


def test_the_operator_is_told_of_every_option() -> None:
    described = set(OPTION.findall(text_of(CONFIGURATION)))
    assert described == known_options()


def test_every_setting_is_described_with_its_default_and_its_reason() -> None:
    assert text_of(CONFIGURATION).endswith(tables()), "run python -m tests.house.configuration_page"


@pytest.mark.parametrize("page", PAGES)
def test_every_option_of_triolet_that_is_named_exists(page: Path) -> None:
    of_others = re.compile(
        r"\b(?:pip|hf|make|pytest|git|podman|docker|useradd|systemctl|curl --unix-socket)\b"
    )
    named = {
        option
        for code in code_in(text_of(page))
        if not of_others.search(code)
        for option in OPTION.findall(code)
    }
    assert named <= known_options()
