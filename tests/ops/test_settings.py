"""Tests of settings from file, pipe, `--set` and options: validation and precedence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ops.cli import main
from ops.cli.options import NAMED, add_models, gather
from ops.cli.show_config import reason
from ops.settings.form import (
    MODELS,
    Settings,
    document,
    leaves,
    of_role,
    spread,
    types_of,
    value_at,
)
from ops.settings.sources import SettingSources, read_settings
from ops.supervisor.prepare import require_auto
from tests.house.test_layout import ROOT
from tests.packaging.shown import FENCED
from triolet.config import (
    Dtype,
    FleetModelConfig,
    LendingConfig,
    LinkConfig,
    MemorySharing,
    ModelLimits,
    PeerServersConfig,
    ServedModelConfig,
    ToolParser,
    WireConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.tenants.form import read_tenants
from triolet.tenants.ladders import require_tenant_ladders
from triolet.units import MIB

if TYPE_CHECKING:
    from pathlib import Path


def settings(*assignments: str, file: str = "", **named: Any) -> Settings:  # noqa: ANN401
    sources = SettingSources()
    if file:
        sources.add_document(file.encode(), "triolet.toml")
    sources.add_assignments(assignments)
    given = gather(None, (), named)
    for path, value in given.values.items():
        sources.add(path, value, given.origins[path])
    return sources.settings()


LINK = LinkConfig(
    peer_timeout_s=2.5, lease_ttl_s=4.0, wire=WireConfig(MemorySharing.ON, plaintext=True)
)


@pytest.mark.parametrize("role", [Role.SERVER, Role.PREFILL, Role.DECODE])
def test_a_process_understands_all_that_its_supervisor_means(role: Role) -> None:
    meant = settings(
        "server.queue.fair=false",
        "server.allow_origins=https://app.example,*",
        "server.overload.slo.batch_s=9",
        "server.host=127.0.0.2",
        "worker.engine.dtype=bfloat16",
        "worker.engine.kv_pool_bytes=3MiB",
        "worker.speculation.source=lookup",
        "process.log_level=debug",
        'auto.ladder=["small","large"]',
        'auto.limits=[{"model":"small","tools":false}]',
    )
    meant = of_role(
        meant, Role.SERVER, link=LINK, peers=PeerServersConfig("a", 3, (("a", "/x"), ("b", "/y")))
    )
    meant = of_role(meant, Role.PREFILL, link=LINK, lending=LendingConfig("/x/cores", 0, 3))
    meant = of_role(meant, Role.DECODE, link=LINK, name="decode-0", kv_address="ipc:///k")
    sources = SettingSources()
    sources.add_document(document(meant, role), "a pipe")
    read = sources.settings()
    assert read.process == meant.process
    if role is Role.SERVER:
        assert read.server == meant.server
    else:
        assert read.worker(role) == meant.worker(role)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("server.queue.fair=false", ("server", "queue", "fair"), False),
        ("link.peer_timeout_s=1.9", ("link", "peer_timeout_s"), 1.9),
        ("worker.engine.kv_pool_bytes=2MiB", ("worker", "engine", "kv_pool_bytes"), 2 * MIB),
        ("worker.engine.kv_pool_bytes=auto", ("worker", "engine", "kv_pool_bytes"), None),
        ("worker.engine.dtype=auto", ("worker", "engine", "dtype"), Dtype.AUTO),
        ("server.trusted_proxies=10.0.0.0/8, fd00::/8", ("server", "trusted_proxies"), ...),
    ],
)
def test_a_value_is_read_by_the_type_of_its_field(
    text: str, path: tuple[str, ...], value: object
) -> None:
    found = read_settings(None, [text]).settings()
    expected = ("10.0.0.0/8", "fd00::/8") if value is ... else value
    read = [value_at(found, one) for one in spread(path)]
    assert read == [expected] * len(read)
    assert {type(one) for one in read} == {type(expected)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server.fair=false", "server.fair is unknown; did you mean server.queue.fair?"),
        ("server.token_windw=3", "did you mean server.token_window?"),
        ("sever.port=3", "did you mean server?"),
        ("server.port", "is not an assignment"),
        ("server.queue=3", "server.queue is a section"),
        ("server.port.x=3", "is a value and has no fields"),
        ("server.link.peer_timeout_s=3", "set it by section [link]"),
        ("server.model_dir=/x", "set it by fleet.model"),
        ("prefill.speculation.source=lookup", "use decode.speculation.source"),
        ("prefill.speculation={}", "use decode.speculation"),
        ("prefill.kv_address=ipc:///k", "use decode.kv_address"),
        ("prefill.advertised_kv_address=ipc:///k", "use decode.advertised_kv_address"),
        ("prefill.engine.prompt_chunk_tokens=8", "use decode.engine.prompt_chunk_tokens"),
        ("decode.max_waiting_tokens=8", "use prefill.max_waiting_tokens"),
        ("decode.engine.embedding.max_wait_s=0", "use prefill.engine.embedding.max_wait_s"),
        ("server.queue.fair=1", "server.queue.fair is 1; allowed: true or false"),
        ("server.recent_s=1e999", "allowed: a number"),
        ("server.port=true", "server.port is True; allowed: a whole number"),
        ("worker.engine.kv_pool_bytes=lots", "worker.engine.kv_pool_bytes: size 'lots'"),
        ("link.peer_timeout_s=0.1", "link.peer_timeout_s is 0.1; allowed: > 2 x"),
        ("link.lease_ttl_s=1", "link.lease_ttl_s is 1.0; allowed: > peer_timeout_s (1.5)"),
        ("server.link=1", "set it by section [link]"),
        ("decode.engine.block_size=0", "decode.engine.block_size is 0"),
        ("worker.engine.block_size=0", "worker.engine.block_size is 0"),
        ("decode.speculation.draft_pool_bytes=0", "draft_pool_bytes is 0; allowed: >= 1"),
        ("server.auto.ladder=a", "set it by section [auto]"),
        ("auto.ladder=[]", "auto.ladder is []; allowed: 1 to 16 names of different models"),
        ("auto.ladder=a,b,a", "auto.ladder is ['a', 'b', 'a']; allowed: 1 to 16 names"),
        ("auto.wake=never", "auto.wake is 'never'; allowed: if_needed, always"),
        ("auto.wake=always", " needs a ladder too; give ladder"),
        ("auto.completion_tokens=9", " needs a ladder too; give ladder"),
        ('auto.limits=[{"model":"a"}]', " needs a ladder too; give ladder"),
        ('auto.limits=[{"model":"a","context_tokens":1}]', "context_tokens is 1; allowed: >= 2"),
        ('auto.limits=[{"tools":false}]', "allowed: a table that has model, "),
    ],
)
def test_what_cannot_be_is_refused_with_the_argument(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(None, [text]).settings()
    assert words in str(refused.value)
    assert f"--set {text.partition('=')[0]}" in str(refused.value)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("[server]\n\n[server.queue]\nfare = true\n", "triolet.toml, line 4: server.queue.fare"),
        (
            "[server]\nport = 1\nqueue.fair = 3\n",
            "server.queue.fair is 3; allowed: true or false (triolet.toml, line 3)",
        ),
        ("[server]\nport = 1\ntoken_window = 0\n", "is 0; allowed: >= 1 (triolet.toml, line 3)"),
        (
            "[server]\nrecent_s = inf\n",
            "server.recent_s is 'inf'; allowed: a number (triolet.toml, line 2)",
        ),
        ("[server]\nport = 1\nquue.fair = true\n", "line 3: server.quue is unknown; did you mean"),
        ("server.port = 1\nserver.quue.fair = true\n", "line 2: server.quue is unknown"),
        ("[server]\nport.low = 1\n", "server.port is {'low': 1}; allowed: a whole number, 0 to "),
        ("[server]\nport = 1\nno-such = 1\n", "line 3: server.no-such is unknown"),
        ("[server.queue]\n[server.quue.inner]\nfair = true\n", "line 2: server.quue is unknown"),
        (
            "[server]\nqueue = { fair = 3 }\n",
            "fair is 3; allowed: true or false (triolet.toml, line 2)",
        ),
        ("server = 3\n", "server is 3; allowed: a table"),
        ("[auto]\n", "auto is empty; give ladder = "),
        (
            '[auto]\nladder = ["a"]\n[[auto.limits]]\nmodel = "a"\ntool = 1\n',
            "auto.limits.0.tool is unknown; did you mean auto.limits.0.tools?",
        ),
        (
            '[auto]\nladder = ["a"]\nlimits = [{ model = "a" }, { model = "a" }]\n',
            "auto.limits lists a twice; allowed: once each (triolet.toml, line 3)",
        ),
        ("[server\n", "triolet.toml is neither TOML nor JSON"),
        ('{"server": {"port": "x"}}', "allowed: a whole number, 0 to 65535 (triolet.toml)"),
    ],
)
def test_what_cannot_be_is_refused_with_file_and_line(file: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(file=file)
    assert words in str(refused.value)


def test_a_password_is_no_argument() -> None:
    url = "redis://:secret@127.0.0.1"
    with pytest.raises(ConfigError, match="contains a password") as refused:
        settings(f"server.tenants.quotas.limits={url}")
    assert "secret" not in str(refused.value)
    found = settings(file=f'[server.tenants.quotas]\nlimits = "{url}"\n')
    assert found.server.tenants.quotas.limits == url


WHOLE_BLOCKS = "KV is sent in whole blocks after each step"


def test_an_option_can_turn_a_setting_off() -> None:
    assert settings().server.generic_tools
    assert not settings(no_generic_tools=True).server.generic_tools
    assert settings(no_generic_tools=False).server.generic_tools


@pytest.mark.parametrize("command", ["serve", "server", "prefill", "decode"])
def test_an_unknown_option_of_a_command_with_settings_names_set(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--token-window", "17"]) == 2
    assert (
        "No such option: --token-window; use `--set FIELD=VALUE` for a setting without an option"
        in (capsys.readouterr().err)
    )
    assert main(["keys", "make", "--token-window", "17"]) == 2
    assert "--set" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "name", "instead"),
    [
        ("link.wire", "layer_groups", WHOLE_BLOCKS),
        ("link.wire", "layer_group_min_tokens", WHOLE_BLOCKS),
        ("worker.engine", "kv_wire", "KV is sent in the computing dtype"),
    ],
)
def test_a_setting_that_there_was_is_refused_with_the_reason(
    section: str, name: str, instead: str
) -> None:
    why = f"{section}.{name} was removed: {instead}"
    with pytest.raises(ConfigError, match=why):
        settings(f"{section}.{name}=2")
    with pytest.raises(ConfigError, match=why):
        settings(file=f"[{section}]\n{name} = 2\n")


def test_every_name_stands_for_a_field() -> None:
    assert all(one.path in leaves() for one in NAMED.values())
    assert len(NAMED) + 3 <= 30, "with --config, --set and --help they fit on a screen"


def test_every_field_has_a_reason() -> None:
    of_models = [(MODELS, "chat", name) for name in types_of(FleetModelConfig)]
    assert [path for path in (*leaves(), *of_models) if not reason(path)] == []


def test_config_show_names_value_origin_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "triolet.toml"
    file.write_text(
        '[server]\nport = 9\n[server.tenants.quotas]\nlimits = "redis://:hunter2@h"\n'
        "[decode.engine]\nthreads = 2\n"
    )
    arguments = ["--config", str(file), "--set", "link.max_peers=7", "--json"]
    assert main(["config", "show", *arguments]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    rows = {row["field"]: row for row in json.loads(out)}
    assert rows["server.port"]["origin"] == f"{file}, line 2"
    assert (rows["link.max_peers"]["value"], rows["link.max_peers"]["origin"]) == (
        7,
        "--set link.max_peers",
    )
    assert rows["server.token_window"]["origin"] == "default"
    assert "back-pressure" in rows["server.token_window"]["reason"]
    assert rows["decode.engine.threads"]["value"] == 2
    assert rows["prefill.engine.threads"]["value"] is None
    assert "worker.engine.threads" not in rows
    assert main(["config", "show"]) == 0
    assert "server.port = 8000" in capsys.readouterr().out


def test_config_show_has_what_differs_from_the_defaults_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "triolet.toml"
    file.write_text("[server]\nport = 8000\n[decode.engine]\nthreads = 2\n[server.queue]\n")
    arguments = ["chat=demo", "--config", str(file), "--decode", "3"]
    arguments += ["--set", "link.max_peers=7", "--set", "fleet.prefill=1"]
    changed = ["config", "show", *arguments, "--changed"]
    assert main([*changed, "--json"]) == 0
    told = {
        row["field"]: (row["value"], row["default"], row["origin"])
        for row in json.loads(capsys.readouterr().out)
    }
    assert told == {
        "fleet.decode": (3, Settings().fleet.decode, "--decode"),
        "decode.engine.threads": (2, None, f"{file}, line 4"),
        "link.max_peers": (7, Settings().server.link.max_peers, "--set link.max_peers"),
        "models.chat.ref": ("demo", "", "the argument chat=demo"),
    }
    assert main(changed) == 0
    out = capsys.readouterr().out
    assert f"decode.engine.threads = 2  ({file}, line 4; default: none)" in out
    assert "server.port" not in out, "it is set, and to its default"
    assert main(["config", "show", "--changed"]) == 0
    assert capsys.readouterr().out == "Every setting has its default.\n"


def test_serve_refuses_what_it_sets_itself() -> None:
    of_server = ("server.listen_fd=3", "server.models=[]", "server.model_digest=x")
    for text in ("worker.control_address=ipc:///x", *of_server, "decode.name=a"):
        with pytest.raises(ConfigError, match="for a role that runs alone"):
            read_settings(None, [text]).refuse_for_serve()


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = settings(tenants="a.toml", batch_dir="b", limits="@c")
    assert found.server.tenants.file == str(tmp_path / "a.toml")
    assert found.server.batches.directory == str(tmp_path / "b")
    assert found.server.tenants.quotas.limits == f"@{tmp_path / 'c'}"
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").touch()
    assert settings("worker.speculation.source=draft").decode.speculation.draft_dir == str(
        tmp_path / "draft"
    )


def test_a_field_of_one_kind_of_worker_is_set_for_that_kind_alone() -> None:
    found = settings(
        "worker.speculation.source=lookup",
        "worker.engine.embedding.max_wait_s=0",
        "worker.max_waiting_tokens=9",
    )
    plain = Settings()
    assert found.decode.speculation.source == "lookup"
    assert found.prefill.speculation == plain.prefill.speculation
    assert found.prefill.engine.embedding.max_wait_s == 0
    assert found.decode.engine == plain.decode.engine
    assert (found.prefill.max_waiting_tokens, found.decode.max_waiting_tokens) == (9, 32_768)


@pytest.mark.parametrize("url", ["redis://[::1", "redis://h?password=x", "unix:///s?db=1"])
def test_a_url_with_parts_that_are_not_read_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"limits is .*; allowed: memory, redis://"):
        settings(f"server.tenants.quotas.limits={url}")


def test_a_broken_url_with_a_password_is_refused_without_it() -> None:
    with pytest.raises(ConfigError) as refused:
        settings("server.tenants.quotas.limits=redis://:secret@[h")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("server.membership.dns.decode=d", r"decode is 'd'; allowed: NAME:PORT, or _SERVICE"),
        ("server.membership.dns.prefill=_x.test:1", "prefill is '_x.test:1'; allowed: NAME:PORT"),
        ("server.membership.dns.nameserver=ns:53", "nameserver is 'ns:53'; allowed: IP-ADDRESS"),
        ("server.membership.redis.url=http://h", r"url is 'http://h'; allowed: redis://HOST"),
        ("server.membership.redis.url=redis://:pw@h", "contains a password"),
        ("server.membership.redis.fleet=a/b", "fleet is 'a/b'; allowed: 1 to 63 letters"),
        ("decode.membership.ttl_s=0.5", "renew_s is 1.0; allowed: below 0.5 s"),
    ],
)
def test_settings_of_membership_are_checked(assignment: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(assignment)


def test_sources_of_members_are_read_and_the_file_of_a_url_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("decode=_control._tcp.d.test", "prefill=p-1.test:7001", "nameserver=[::1]:53")
    dns = settings(*(f"server.membership.dns.{one}" for one in names)).server.membership.dns
    assert (dns.is_on, dns.nameserver) == (True, "[::1]:53")
    found = settings("worker.membership.redis.url=@url", "server.membership.redis.url=@url")
    for redis in (found.decode.membership.redis, found.server.membership.redis):
        assert redis.url == f"@{tmp_path / 'url'}"


@pytest.mark.parametrize(
    ("role", "assignment"),
    [
        (Role.SERVER, "worker.engine.threads=1"),
        (Role.SERVER, "fleet.servers=2"),
        (Role.SERVER, "supervisor.stable_s=2"),
        (Role.PREFILL, "server.port=1"),
        (Role.PREFILL, "decode.kv_address=ipc:///k"),
        (Role.PREFILL, "worker.speculation.source=lookup"),
        (Role.DECODE, "worker.engine.embedding.max_wait_s=0"),
    ],
)
def test_a_role_refuses_an_assignment_that_it_does_not_read(role: Role, assignment: str) -> None:
    name = assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=f"--set {name} has no effect: `triolet {role.value}`"):
        read_settings(None, [assignment]).refuse_for_role(role)
    table, _, field = name.rpartition(".")
    value = json.dumps(assignment.partition("=")[2])
    value = value.strip('"') if value.strip('"').isdigit() else value
    both = SettingSources()
    both.add_document(f"[{table}]\n{field} = {value}\n".encode(), "triolet.toml")
    both.refuse_for_role(role)


@pytest.mark.parametrize("role", list(Role)[:3])
def test_a_role_takes_assignments_for_itself_and_for_all(role: Role) -> None:
    own = "server.port=1" if role is Role.SERVER else "worker.engine.threads=1"
    said = [own, "link.peer_timeout_s=1.9", "process.log_level=debug", "fleet.model=demo"]
    read_settings(None, said).refuse_for_role(role)


def test_names_of_the_model_and_lists() -> None:
    found = settings(model_name=["a", "*", "b", "a"], trusted_proxies=["10.0.0.0/8,fd00::/8"])
    assert (found.server.model_name, found.server.model_aliases) == ("a", ("b", "*"))
    assert found.server.trusted_proxies == ("10.0.0.0/8", "fd00::/8")
    assert replace(found.fleet, model=None) == found.fleet


MODELS_FILE = """
[models.chat]
ref = "chat@stable"
aliases = ["gpt-4o"]
[models."qwen2.5"]
ref = "demo"
decode = 2
"""


def with_models(*arguments: str, sets: tuple[str, ...] = (), file: str = "") -> SettingSources:
    sources = SettingSources()
    sources.add_document(file.encode(), "triolet.toml")
    sources.add_assignments(sets)
    add_models(sources, arguments)
    return sources


def test_models_come_from_files_assignments_and_arguments() -> None:
    sets = ("models.code.start=false", "models.qwen2.5.prefill=3", "models.chat.tool_parser=hermes")
    sources = with_models("chat=/models/chat", "code=demo", sets=sets, file=MODELS_FILE)
    found = sources.settings().models
    assert list(found) == ["chat", "qwen2.5", "code"]
    assert found == {
        "chat": FleetModelConfig("/models/chat", ("gpt-4o",), tool_parser=ToolParser.HERMES),
        "qwen2.5": FleetModelConfig("demo", prefill=3, decode=2),
        "code": FleetModelConfig("demo", start=False),
    }
    origins = {name: sources.origin(("models", name, "ref")) for name in ("chat", "qwen2.5")}
    assert origins == {"chat": "the argument chat=/models/chat", "qwen2.5": "triolet.toml, line 6"}


def test_a_model_without_a_name_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_models("demo").settings().fleet.model == "demo"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert with_models("a=b").settings().fleet.model == "a=b"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("chat:v1", "chat"),
        (f"chat@sha256:{'0' * 64}", "chat"),
        ("Own-1.5", "Own-1.5"),
        ("Own-1.5/", "Own-1.5"),
        ("own.Q4_1.gguf", "own.Q4_1"),
    ],
)
def test_with_settings_of_control_the_only_model_has_its_public_name(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Own-1.5").mkdir()
    (tmp_path / "own.Q4_1.gguf").touch()
    found = with_models(model, sets=("control.memory_bytes=1GiB",)).settings()
    assert (found.fleet.model, found.models) == (None, {name: FleetModelConfig(model)})
    assert with_models(model, sets=("link.load_report_interval_s=0.01",)).settings().models == {}


def test_a_directory_whose_name_control_cannot_use_is_refused_with_settings_of_control(
    tmp_path: Path,
) -> None:
    (folder := tmp_path / "a model").mkdir()
    assert with_models(str(folder)).settings().fleet.model == str(folder)
    with pytest.raises(ConfigError, match="'a model' is not a model name; allowed: 1 to 63"):
        with_models(str(folder), sets=("control.memory_share=0.5",))
    with pytest.raises(ConfigError, match=r"server.model_name is 'x', but .* named models"):
        with_models("demo", sets=("control.memory_share=0.5", "server.model_name=x")).settings()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo chat=demo", "2 models are given, and 'demo' has no public name"),
        ("demo smollm2", "2 models are given, and 'demo' has no public name"),
        ("a=demo a=smollm2", "two models are called a: demo and smollm2"),
        ("=demo", "'' is not a model name; allowed: 1 to 63"),
        ("a/b=demo", "'a/b' is not a model name"),
        (f"{'a' * 64}=demo", "is not a model name"),
        ("chat=", "'chat=' names no model; give chat=MODEL"),
    ],
)
def test_arguments_that_name_models_wrongly_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_models(*arguments.split())


@pytest.mark.parametrize(
    ("arguments", "sets", "file", "words"),
    [
        ("demo", "", MODELS_FILE, "fleet.model is 'demo', but the fleet has named models "),
        ("demo", "", MODELS_FILE, "(the argument demo, triolet.toml, line 3, "),
        ("", "server.model_name=x", MODELS_FILE, "or give models.NAME.aliases"),
        ("", "", "[models.chat]\n", "triolet.toml, line 1: models.chat is empty; give its ref"),
        ("", "", "[models.chat]\nstart = false\n", "models.chat.ref is missing; give its ref"),
        ("", "", "[models.chat]\nstart = false\n", "(triolet.toml, line 2)"),
        ("", "", '[models.chat]\nreff = "demo"\n', "line 2: models.chat.reff is unknown; did you"),
        ("", "", '[models.chat.ref]\nx = "demo"\n', "models.chat.ref is {'x': 'demo'}; allowed"),
        ("", "", '[models."a/b"]\nref = "demo"\n', "models: 'a/b' is not a model name"),
        ("", "", "models = 3\n", "models is 3; allowed: a table"),
        ("", "models.chat=demo", "", "models.chat is a section; set one of its fields: ref"),
        ("", "models.chat.x=1", "", "models.chat.x is unknown; allowed: ref, aliases"),
        ("", "models=demo", "", "is not an assignment; allowed"),
        ("a=demo", "models.a.decode=0", "", "models.a.decode is 0; allowed: 1 to 64 (--set models"),
        ("a=demo", "models.a.keep_alive_s=0", "", "models.a.keep_alive_s is 0; allowed: > 0"),
        (
            "a=demo b=demo",
            "models.a.aliases=b",
            "",
            "models.a.aliases has 'b', which is already a name of",
        ),
        ("a=demo", "models.b.aliases=x", "", "models.b.ref is missing"),
    ],
)
def test_models_that_cannot_be_are_refused(
    arguments: str, sets: str, file: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        with_models(*arguments.split(), sets=tuple(sets.split()), file=file).settings()
    assert words in str(refused.value)


def test_config_show_has_the_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "triolet.toml"
    file.write_text(MODELS_FILE)
    assert main(["config", "show", "--config", str(file), "--json"]) == 0
    rows = {row["field"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["models.qwen2.5.decode"]["value"] == 2
    assert rows["models.qwen2.5.decode"]["origin"] == f"{file}, line 7"
    assert rows["models.chat.start"]["origin"] == "default"
    assert "start with the fleet" in rows["models.chat.start"]["reason"]
    assert main(["config", "show", "--config", str(file)]) == 0
    assert "models.chat.aliases = gpt-4o" in capsys.readouterr().out


def test_a_server_is_told_of_several_models() -> None:
    told = ServedModelConfig("chat", "/m", "sha256:1", ("a",), ("ipc:///p",), ("ipc:///d",))
    meant = of_role(Settings(), Role.SERVER, models=(told,))
    sources = SettingSources()
    sources.add_document(document(meant, Role.SERVER), "a pipe")
    assert sources.settings().server.models == (told,)


def test_the_ladder_of_the_operators_page_is_taken() -> None:
    page = (ROOT / "docs" / "operations" / "auto.md").read_text(encoding="utf-8")
    (file, tenants) = [text for kind, text in FENCED.findall(page) if kind == "toml"]
    found = with_models(file=file).settings()
    assert found.server.auto.ladder == ("small", "large")
    assert found.server.auto.limits_of("small") == ModelLimits("small", 2048, tools=False)
    assert found.server.auto.limits_of("large") == ModelLimits("large")
    require_auto(found)
    secret = f'cache_secret = "{"0" * 64}"\n'
    of_tenants = read_tenants((secret + tenants).encode(), "tenants.toml")
    require_tenant_ladders(of_tenants, found.server.auto, found.models, "tenants.toml")
    assert of_tenants.by_name["acme"].auto == ("large",)


def test_the_settings_of_the_operators_page_are_taken() -> None:
    page = (ROOT / "docs" / "operations" / "models.md").read_text(encoding="utf-8")
    ((kind, file),) = [(kind, text) for kind, text in FENCED.findall(page) if kind]
    assert kind == "toml"
    found = with_models(file=file, sets=("models.chat.decode=3",)).settings().models
    assert found["chat"].decode == 3
    assert (found["qwen2.5-coder"].tool_parser, found["qwen2.5-coder"].start) == ("hermes", False)
