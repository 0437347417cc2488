"""Tests of link addresses: how they are parsed, and which are safe to bind or to announce."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from transport.address import (
    MAX_IPC_PATH_BYTES,
    IpcAddress,
    TcpAddress,
    address_in_use,
    parse_address,
    require_dialable,
)
from triolet.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("ipc:///run/triolet/decode-0", IpcAddress(Path("/run/triolet/decode-0"))),
        ("tcp://127.0.0.1:7001", TcpAddress("127.0.0.1", 7001)),
        ("tcp://127.0.0.1:*", TcpAddress("127.0.0.1", 0)),
        ("tcp://localhost:0", TcpAddress("localhost", 0)),
        ("tcp://[::1]:7001", TcpAddress("[::1]", 7001)),
        ("tcp://*:7001", TcpAddress("*", 7001)),
    ],
)
def test_an_address_is_understood(text: str, meaning: IpcAddress | TcpAddress) -> None:
    assert parse_address(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:7001",
        "http://127.0.0.1:7001",
        "inproc://x",
        "ipc://",
        "ipc://relative/path",
        "ipc://@abstract",
        "ipc:///directory/",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:7001/x",
        "tcp://::1:7001",
        "tcp://:7001",
        "tcp://eth0;127.0.0.1:7001:1",
        "tcp://eth0;127.0.0.1:7001",
        "tcp://ho st:7001",
        "tcp://127.0.0.1:٧٠٠١",
        "ipc:///directory/na\0me",
        "ipc:///directory/na\nme",
        f"tcp://{'h' * 241}:7001",
    ],
)
def test_another_form_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        parse_address(text)


def test_an_ipc_path_has_a_longest_length() -> None:
    longest = "/" + "x" * (MAX_IPC_PATH_BYTES - 1)
    assert parse_address(f"ipc://{longest}") == IpcAddress(Path(longest))
    with pytest.raises(ConfigError, match="at most 107"):
        parse_address(f"ipc://{longest}x")
    with pytest.raises(ConfigError, match="at most 107"):
        parse_address("ipc:///" + "ü" * 54)


def test_a_private_directory_is_asked_for(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    address = IpcAddress(directory / "decode-0")
    with pytest.raises(ConfigError, match="mkdir -p -m 700"):
        address.require_private_directory()
    directory.mkdir(0o700)
    address.require_private_directory()
    for mode in (0o755, 0o770, 0o701):
        directory.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 700"):
            address.require_private_directory()


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ConfigError, match="a directory of your own"):
        IpcAddress(tmp_path / "x").require_private_directory()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        IpcAddress(tmp_path / "file" / "x").require_private_directory()


def test_a_listening_process_is_found_and_a_dead_ones_file_is_not_in_the_way(
    tmp_path: Path,
) -> None:
    address = IpcAddress(tmp_path / "x")
    address.require_unused()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address.path))
        listener.listen(0)
        with pytest.raises(ConfigError, match="in use"):
            address.require_unused()
        # It never accepts, so its backlog is full by now.
        with pytest.raises(ConfigError, match="in use"):
            address.require_unused()
    assert address.path.exists()
    address.require_unused()


def test_the_error_names_the_address_and_the_remedy() -> None:
    assert "tcp://127.0.0.1:1 is in use" in str(address_in_use("tcp://127.0.0.1:1"))


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7002", "tcp://*:7002", "tcp://a:*", "tcp://a"])
def test_an_address_that_nobody_can_dial_is_not_announced(address: str) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        require_dialable(address)


def test_an_address_of_another_network_is_announced() -> None:
    require_dialable("tcp://203.0.113.9:7002")
    require_dialable("tcp://decode.example:7002")
