"""Tests of settings that are tables, such as adapters, and of settings from several sources."""

from __future__ import annotations

import re
from typing import get_args, get_origin

import pytest

from ops.settings.form import is_section, leaves, without_none
from triolet.errors import ConfigError
from triolet.units import MIB

from .test_settings import settings

TABLES = [
    ("worker.lending", "path", '{"pth": 1}'),
    ("server.peers", "name", '{"nam": 1}'),
    ("server.models", "0.digest", '[{"digst": 1}]'),
    ("server.models", "0.adapters.0.base", '[{"adapters": [{"bas": 1}]}]'),
    ("server.model_adapters", "0.digest", '[{"digst": 1}]'),
    ("server.unnamed_adapters", "0.digest", '[{"digst": 1}]'),
    ("worker.engine.adapters", "0.digest", '[{"digst": 1}]'),
    ("control.models", "0.pool_bytes", '[{"pool_byte": 1}]'),
    ("auto.limits", "1.tools", '[{"model": "a"}, {"tool": 1}]'),
]


@pytest.mark.parametrize(("field", "meant", "table"), TABLES)
def test_a_name_in_a_table_that_is_unknown_is_refused(field: str, meant: str, table: str) -> None:
    *_, name = re.findall(r'"(\w+)"', table)
    parent = f"{field}.{meant}".rpartition(".")[0]
    words = f"{parent}.{name} is unknown; did you mean {field}.{meant}?"
    nested = table
    for section in reversed(field.split(".")):
        nested = f'{{"{section}": {nested}}}'
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings(file=nested)
    with pytest.raises(ConfigError, match=re.escape(words)):
        settings(f"{field}={table}")


def test_every_field_that_takes_tables_is_among_them() -> None:
    named = {field for field, _, _ in TABLES}
    for path, kind in leaves().items():
        inner = without_none(kind)
        origin: object = get_origin(inner)
        each = get_args(inner)[0] if origin is tuple else inner
        if path[0] not in ("prefill", "decode"):
            assert is_section(each) == (".".join(path) in named), path


def test_tables_hold_sizes_and_words_as_sections_do() -> None:
    table = '{"name": "a", "model_dir": "/a", "pool_bytes": "2MiB", "keep_alive_s": "none"}'
    (model,) = settings(f"control.models=[{table}]").control.models
    assert (model.pool_bytes, model.keep_alive_s) == (2 * MIB, None)


def test_the_later_source_counts() -> None:
    file = (
        '[server]\nport = 1\ntoken_window = 2\nhost = "127.0.0.2"\n[prefill.engine]\nthreads = 3\n'
    )
    found = settings("server.token_window=4", "server.port=5", file=file, port=6)
    assert (found.server.host, found.server.token_window, found.server.port) == ("127.0.0.2", 4, 6)
    assert (found.prefill.engine.threads, found.decode.engine.threads) == (3, None)
    assert settings("worker.engine.threads=7", file=file).prefill.engine.threads == 7


def test_a_section_of_one_kind_of_worker_counts_before_that_of_both_in_one_file() -> None:
    file = "[decode.engine]\nthreads = 2\n[worker.engine]\nthreads = 5\n"
    found = settings(file=file)
    assert (found.prefill.engine.threads, found.decode.engine.threads) == (5, 2)


def test_a_wrong_value_is_refused_although_a_later_source_replaces_it() -> None:
    words = r"server\.port is 'x'; allowed: .* 0 to 65535 \(triolet\.toml, line 2\)"
    with pytest.raises(ConfigError, match=words):
        settings("server.port=5", file='[server]\nport = "x"\n')
    with pytest.raises(
        ConfigError, match=r"block_size is 0; .* \(--set worker\.engine\.block_size"
    ):
        settings(
            "worker.engine.block_size=0",
            "prefill.engine.block_size=16",
            "decode.engine.block_size=16",
        )
