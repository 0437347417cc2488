"""Tests of the Containerfile and the Compose file as text; nothing is built or started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.house.test_layout import ROOT

from .command_lines import server_config
from .tree import FILES, SHIPPED

if TYPE_CHECKING:
    from triolet.config import ServerConfig

DEPLOY: Final = ROOT / "ops" / "deploy"
CONTAINERFILE: Final = (ROOT / "Containerfile").read_text(encoding="utf-8")
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
GIVEN_BY_OPERATOR: Final = {"secrets/operator.key", "secrets/grafana.password"}
"""Files that docs/install.md tells operators to create first."""
TIMEOUT_S: Final = 60.0


def instructions() -> list[tuple[str, str]]:
    """Return every instruction with its text, continuation lines joined."""
    lines = [line for line in CONTAINERFILE.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in text.splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in pairs]


def all_of(name: str) -> list[str]:
    return [text for given, text in instructions() if given == name]


def last_of(name: str) -> str:
    return all_of(name)[-1]


def test_everything_that_is_copied_exists_and_is_not_ignored() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        source
        for text in all_of("COPY")
        if not text.startswith("--from=")
        for source in text.split()[:-1]
    ]
    assert {*FILES, *SHIPPED} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in patterns, source


def test_the_command_is_a_real_one_that_listens_on_loopback() -> None:
    (program,) = json.loads(last_of("ENTRYPOINT"))
    assert program == "triolet"
    config = server_config(json.loads(last_of("CMD")))
    assert (config.host, config.tenants.file) == ("127.0.0.1", None)
    assert str(config.port) == last_of("EXPOSE")
    assert f"http://127.0.0.1:{config.port}/health'" in health_check()


def health_check() -> str:
    """Return the health check's Python program."""
    check = re.search(r"\[.*\]$", last_of("HEALTHCHECK"))
    assert check is not None
    *python, program = json.loads(check[0])
    assert python == ["python3", "-c"]
    return str(program)


class Health(BaseHTTPRequestHandler):
    """Answers each request with the class's status."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(type(self).status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(("status", "is_well"), [(200, True), (503, False)])
def test_the_health_check_asks_the_server_and_no_proxy(
    status: int, is_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Health, "status", status)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # Port 9 of loopback, "discard": no proxy runs there.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        program = health_check().replace(":8000/", f":{server.server_port}/")
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        server.shutdown()
    assert (done.returncode == 0) is is_well, done.stderr
    assert is_well or f"HTTP Error {status}" in done.stderr


def test_nothing_runs_as_root_and_what_is_written_is_a_volume() -> None:
    order = [name for name, _ in instructions()]
    assert last_of("USER") == "10001:10001"
    assert "RUN" not in order[order.index("USER") :]
    assert set(json.loads(last_of("VOLUME"))) == {"/models", "/data"}
    assert "HOME=/data" in last_of("ENV")
    assert last_of("WORKDIR") == "/data"


def test_packages_are_those_that_figures_were_measured_with() -> None:
    (install,) = (text for text in all_of("RUN") if " install " in text)
    assert '--constraint constraints.txt ".$extra"' in install
    hosts = re.findall(r"://([\w.-]+)", CONTAINERFILE)
    assert set(hosts) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("device", "cuda", "refusal"),
    [
        ("cpu", None, ""),
        ("cuda", "13.0", ""),
        ("cpu", "13.0", "torch is a CUDA build: name an index with cpu builds"),
        ("cuda", None, "torch is a CPU build: name an index with cuda builds"),
        ("gpu", None, "DEVICE is cpu or cuda"),
    ],
)
def test_the_build_of_torch_is_the_one_for_the_device(
    device: str, cuda: str | None, refusal: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(f"class version: cuda = {cuda!r}\n")
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >asked\n')
    (tmp_path / "pip").chmod(0o700)
    (install,) = (text for text in all_of("RUN") if " install " in text)
    script = install.partition("/etc/pip.conf")[2].replace("/opt/triolet/bin/pip", "./pip")
    done = subprocess.run(
        ["sh", "-c", script.replace("/opt/triolet/bin/python", sys.executable)],
        cwd=tmp_path,
        env={"DEVICE": device, "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert refusal in done.stdout + done.stderr
    assert (done.returncode == 0) is (not refusal)
    if device != "gpu":
        asked = (tmp_path / "asked").read_text().split()[-1]
        assert asked == (".[gpu]" if device == "cuda" else ".")


def test_the_compose_file_gives_the_build_the_secret_that_it_reads() -> None:
    read = re.findall(r"--mount=type=secret,id=(\w+)", CONTAINERFILE)
    assert SERVICES["triolet"]["build"].get("secrets") == read == ["pip"]
    assert COMPOSE["secrets"] == {"pip": {"file": "${TRIOLET_PIP_CONF:-/dev/null}"}}
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    commands = re.findall(r"^.*\b(?:make container|docker compose build)\b.*$", page, re.MULTILINE)
    shown = [line for line in commands if not line.startswith("-") and "`" not in line]
    assert len(shown) >= 2
    assert all("TRIOLET_PIP_CONF=" in line or "--secret id=pip," in line for line in shown)


@pytest.mark.parametrize("name", SERVICES)
def test_every_port_is_published_on_loopback_only(name: str) -> None:
    ports = SERVICES[name].get("ports", [])
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_everything_that_is_mounted_exists(name: str) -> None:
    for mount in SERVICES[name].get("volumes", []):
        source, _, rest = mount.replace("${TRIOLET_MODELS:-./models}", "./models").partition(":")
        assert rest.startswith("/")
        if source.startswith("."):
            is_given = source.removeprefix("./") in GIVEN_BY_OPERATOR | {"models"}
            assert is_given or (DEPLOY / source).exists(), source
            assert rest.endswith(":ro"), mount
        else:
            assert source in COMPOSE["volumes"]


def test_the_server_of_the_compose_file_is_what_is_meant() -> None:
    service = SERVICES["triolet"]
    config = server_config(service["command"])
    assert config.host == "0.0.0.0"
    assert not config.allow_remote_clients, "keys admit others"
    assert service["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    written = {config.tenants.file, config.batches.directory}
    assert all(path is not None and Path(path).is_relative_to("/data") for path in written)
    assert config.tenants.quotas.limits == "redis://redis:6379"
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    stop_s = float(service["stop_grace_period"].removesuffix("s"))
    assert stop_s > longest_stop_s(config)


def longest_stop_s(config: ServerConfig) -> float:
    """Return the longest time that stopping a fleet takes: its server, then its workers."""
    from ops.supervisor.serve import server_exit_s
    from triolet.config import SupervisorConfig

    return server_exit_s(config) + SupervisorConfig().worker_exit_s


def test_redis_takes_its_options(tmp_path: Path) -> None:
    program, *options = SERVICES["redis"]["command"]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    # An invalid option is reported before a port below 0.
    done = subprocess.run(
        [program, *options, "--port", "-1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert "'port \"-1\"'" in done.stdout + done.stderr


def test_prometheus_loads_the_rules_and_the_key_from_where_they_are_mounted(
    tmp_path: Path,
) -> None:
    folder = Path("/etc/prometheus")
    mounts = [mount.split(":") for mount in SERVICES["prometheus"]["volumes"]]
    for source, target, *_ in mounts:
        if Path(target).parent == folder:
            copy = tmp_path / Path(target).name
            if source.removeprefix("./") in GIVEN_BY_OPERATOR:
                copy.write_text("a-key\n")
            else:
                shutil.copyfile(DEPLOY / source, copy)
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    named = [*config["rule_files"], job["authorization"]["credentials_file"]]
    assert all((tmp_path / name).is_file() for name in named)
    assert job["static_configs"] == [{"targets": ["triolet:8000"]}]
    command = SERVICES["prometheus"]["command"]
    assert f"--config.file={folder / 'prometheus.yml'}" in command
    if shutil.which("promtool") is None:
        pytest.skip("promtool (of the package prometheus) is not installed")
    subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        check=True,
        timeout=TIMEOUT_S,
    )


def test_grafana_finds_its_datasource_and_its_dashboard() -> None:
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    for kind in ("datasources", "dashboards"):
        assert mounts[f"./grafana/{kind}"] == f"/etc/grafana/provisioning/{kind}"
    (source,) = read_yaml("grafana/datasources/prometheus.yml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml("grafana/dashboards/triolet.yml")["providers"]
    board = Path(mounts["../monitoring/grafana.json"])
    assert board.parent == Path(provider["options"]["path"])
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(board)
    assert mounts["./secrets/grafana.password"] in environment.values()
    (variable,) = (
        entry
        for entry in json.loads((DEPLOY / "../monitoring/grafana.json").read_text("utf-8"))[
            "templating"
        ]["list"]
        if entry["type"] == "datasource"
    )
    assert variable["query"] == source["type"]


def read_yaml(name: str) -> Any:  # noqa: ANN401 (whatever a file holds)
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))
