"""Tests that the manifests of ops/kubernetes are valid, and match each other, the real command line
and the configuration."""

from __future__ import annotations

import copy
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import kubernetes_validate
import pytest
import typer
import yaml

from tests.house.test_layout import ROOT
from triolet.config import ServerConfig, WorkerConfig
from triolet.errors import ConfigError
from triolet.ids import Role

from .rendering import (
    KUBERNETES,
    POD_IP,
    WHOLE,
    Manifest,
    Workload,
    manifests,
    named,
    rendered,
    workloads,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

VERSIONS: Final = ("1.35", "1.36", "1.37")
GROUPS_OF_KUBERNETES: Final = (
    "v1",
    "apps/v1",
    "policy/v1",
    "networking.k8s.io/v1",
    "autoscaling/v2",
)
STARTUP_S: Final = 2 * 3600
SERVER_MARGIN_S: Final = 20
WORKER_MARGIN_S: Final = 15


def check_schema(one: Manifest) -> None:
    """Check a Kubernetes object against each version's schema; unknown fields fail."""
    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("overlay", WHOLE)
def test_every_object_is_valid_in_every_version(overlay: str) -> None:
    objects = manifests(overlay)
    own = [one for one in objects if one["apiVersion"] in GROUPS_OF_KUBERNETES]
    for one in own:
        check_schema(one)
    assert {one["kind"] for one in own} >= {"Deployment", "Service", "NetworkPolicy"}


@pytest.mark.parametrize("overlay", WHOLE)
def test_every_container_runs_what_the_command_line_and_the_configuration_take(
    overlay: str, tmp_path: Path
) -> None:
    found = list(workloads(manifests(overlay)))
    assert {one.role for one in found} == {Role.SERVER, Role.PREFILL, Role.DECODE}
    for one in found:
        check_config(one, tmp_path)


@pytest.mark.parametrize("overlay", WHOLE)
def test_parts_of_a_limit_add_up_to_the_limit(overlay: str, tmp_path: Path) -> None:
    objects = manifests(overlay)
    servers = [
        (named(objects, "Deployment", one.name)["spec"].get("replicas"), config.tenants.quotas)
        for one in workloads(objects)
        if isinstance(config := one.config(tmp_path), ServerConfig)
    ]
    shared = {quotas.limits for _, quotas in servers if quotas.limits != "memory"}
    if not shared:
        number = sum(replicas for replicas, _ in servers)
        assert {quotas.servers for _, quotas in servers} == {number}
    else:
        assert shared == {"@/run/triolet/redis/url"}, "one Redis for all servers"


def check_config(one: Workload, folder: Path) -> None:
    """Check the configuration that a workload's process reads, and that the pod matches it."""
    config = one.config(folder)
    if isinstance(config, ServerConfig):
        check_server(one, config)
        drain_s = config.drain_timeout_s + SERVER_MARGIN_S
    else:
        check_worker(one, config)
        drain_s = config.drain_timeout_s + WORKER_MARGIN_S
    wait_s = one.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert one.pod["terminationGracePeriodSeconds"] >= wait_s + drain_s
    assert config.curve_dir in one.mounted()
    assert (one.mounted()[config.curve_dir])["secret"]["secretName"] == "triolet-keys"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        one.port(one.container[probe]["httpGet"]["port"])


def check_server(one: Workload, config: ServerConfig) -> None:
    assert (config.host, config.port) == ("0.0.0.0", one.port("http"))
    assert not config.allow_remote_clients, "keys admit clients"
    assert config.tenants.file == "/run/triolet/tenants/tenants.toml"
    spend_file = config.tenants.quotas.spend_file
    assert Path(spend_file or "/").is_relative_to("/data"), "a Secret cannot hold it"
    assert "/run/triolet/tenants" in one.mounted()
    assert config.drain_timeout_s >= config.default_deadline_s, "every stream may end"
    probe = one.container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= config.worker_wait_s
    for role, place in (
        ("prefill", config.membership.dns.prefill),
        ("decode", config.membership.dns.decode),
    ):
        host, _, port = place.partition(":")
        service = named(one.objects, "Service", host)
        assert service["spec"]["clusterIP"] == "None", "DNS names every pod"
        chosen = [w for w in workloads(one.objects) if selects(service["spec"]["selector"], w)]
        assert {w.role for w in chosen} == {Role(role)}
        assert all(w.port("control") == int(port) for w in chosen)


def check_worker(one: Workload, config: WorkerConfig) -> None:
    assert config.name == f"{one.name}-0"
    host = f"tcp://{POD_IP}"
    assert config.control_address == f"{host}:{one.port('control')}"
    assert config.health_address == f"{host}:{one.port('health')}"
    if one.role is Role.DECODE:
        assert config.kv_address == f"{host}:{one.port('kv')}"
    assert str(config.engine.threads) == str(one.container["resources"]["limits"]["cpu"])
    probe = one.container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == STARTUP_S


def selects(selector: dict[str, str], one: Workload) -> bool:
    return selector.items() <= one.labels.items()


@pytest.mark.parametrize("overlay", WHOLE)
def test_pods_may_do_nothing_that_they_need_not(overlay: str) -> None:
    for one in workloads(manifests(overlay)):
        pod, container = one.pod, one.container
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001, "the Containerfile's user"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        written = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
        assert written == ["/data", "/tmp"]
        assert all("emptyDir" in one.mounted()[path] for path in written)
        for volume in pod["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o400) == 0o400


@pytest.mark.parametrize("overlay", WHOLE)
def test_objects_select_the_pods_that_they_mean(overlay: str) -> None:
    objects = manifests(overlay)
    found = list(workloads(objects))
    for one in objects:
        kind, spec = one["kind"], one.get("spec", {})
        if kind == "Service":
            assert any(selects(spec["selector"], w) for w in found), one["metadata"]["name"]
        elif kind == "PodDisruptionBudget":
            assert spec["maxUnavailable"] == 1
            assert sum(selects(spec["selector"]["matchLabels"], w) for w in found) == 1
        elif kind == "Deployment":
            (w,) = (w for w in found if w.name == one["metadata"]["name"])
            assert selects(spec["selector"]["matchLabels"], w)
    budgets = [one for one in objects if one["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == len(found), "one per role and zone"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Create a folder for an operator's overlay beside a copy of ops/kubernetes."""
    shutil.copytree(KUBERNETES, tmp_path / "ops" / "kubernetes")
    (folder := tmp_path / "chat").mkdir()
    return folder


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "disaggregated", "keda", "hpa"])
def test_the_overlay_of_the_page_gives_its_own_images_and_settings(
    overlay: str, own: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text(encoding="utf-8")
    block = textwrap.dedent(page.partition("```yaml\n")[2].partition("   ```")[0])
    (own / "kustomization.yaml").write_text(block.replace("overlays/cpu", f"overlays/{overlay}"))
    settings = (KUBERNETES / "base/workloads/triolet.toml").read_text(encoding="utf-8")
    (own / "triolet.toml").write_text(settings.replace("/models/chat", "/models/another"))
    found = list(workloads(list(yaml.safe_load_all(rendered(own)))))
    for one in found:
        is_cuda = overlay in ("gpu", "disaggregated") and one.role is not Role.SERVER
        image = "registry.example/triolet-cuda" if is_cuda else "registry.example/triolet"
        assert one.container["image"] == f"{image}:0.1.0"
        assert 'model = "/models/another"' in one.settings_text()
        one.config(tmp_path)


@pytest.mark.parametrize("overlay", ["cpu", "zones"])
def test_servers_may_have_their_limits_in_redis(overlay: str, own: Path, tmp_path: Path) -> None:
    (own / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [../ops/kubernetes/overlays/{overlay}]\n"
        "components: [../ops/kubernetes/components/redis]\n"
    )
    objects = list(yaml.safe_load_all(rendered(own)))
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    for one in workloads(objects):
        config = one.config(tmp_path)
        if isinstance(config, ServerConfig):
            file = Path(config.tenants.quotas.limits.removeprefix("@"))
            assert config.scale.redis.url == config.tenants.quotas.limits
            assert one.mounted()[str(file.parent)]["secret"]["secretName"] == "triolet-redis"
            check_schema(named(objects, "Deployment", one.name))
            assert admits(policies, "egress", "to", one, one, "http"), "server.hosts"
        is_server = isinstance(config, ServerConfig)
        assert admits(policies, "egress", "to", one, None, 6379) is is_server


CONNECTIONS: Final = (
    ("server", "prefill", "control"),
    ("server", "decode", "control"),
    ("prefill", "decode", "kv"),
)
"""From, to, and the port's name."""
WITH_REDIS: Final = (*CONNECTIONS, ("server", "server", "http"))
"""Servers that share idempotency keys connect to one another."""


@pytest.mark.parametrize("overlay", WHOLE)
def test_policies_admit_the_connections_that_roles_make_and_no_others(overlay: str) -> None:
    objects = manifests(overlay)
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    found = list(workloads(objects))
    for a in found:
        for b in found:
            for port in b.container["ports"]:
                name = port["name"]
                has_redis = any("redis" in one for one in a.container["args"])
                connections = WITH_REDIS if has_redis else CONNECTIONS
                is_meant = (a.role.value, b.role.value, name) in connections
                can_leave = admits(policies, "egress", "to", a, b, name)
                can_enter = admits(policies, "ingress", "from", b, a, name)
                assert (can_leave and can_enter) is is_meant, (a.name, b.name, name)
    servers = [one for one in found if one.role is Role.SERVER]
    assert all(admits(policies, "ingress", "from", one, None, "http") for one in servers)
    for one in found:
        isolating = [p for p in policies if policy_selects(p["podSelector"], one)]
        assert {kind for p in isolating for kind in p["policyTypes"]} == {"Ingress", "Egress"}
        asks_dns = admits(policies, "egress", "to", one, None, 53)
        assert asks_dns is (one.role is Role.SERVER), "only servers look names up"


def admits(
    policies: list[Manifest],
    way: str,
    peer: str,
    one: Workload,
    other: Workload | None,
    port: str | int,
) -> bool:
    """Return whether a rule admits a connection; `other` is None for a pod outside the fleet."""
    for policy in policies:
        if not policy_selects(policy["podSelector"], one):
            continue
        for rule in policy.get(way, ()):
            peers = rule.get(peer)
            is_peer = peers is None or any(
                ("namespaceSelector" in p)
                if other is None
                else ("namespaceSelector" not in p and policy_selects(p["podSelector"], other))
                for p in peers
            )
            if is_peer and any(p["port"] == port for p in rule["ports"]):
                return True
    return False


def policy_selects(selector: Manifest, one: Workload) -> bool:
    every = all(
        one.labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ())
    )
    return every and selector.get("matchLabels", {}).items() <= one.labels.items()


def replaced(container: Manifest, old: str, new: str) -> None:
    assert any(old in text for text in container["args"])
    container["args"] = [text.replace(old, new) for text in container["args"]]


def renamed(table: Manifest, old: str, new: str) -> None:
    table[new] = table.pop(old)


def in_settings(objects: list[Manifest], old: str, new: str) -> None:
    for one in objects:
        if one["kind"] == "ConfigMap":
            assert old in one["data"]["triolet.toml"]
            one["data"]["triolet.toml"] = one["data"]["triolet.toml"].replace(old, new)


TYPOS: Final[dict[str, Callable[[list[Manifest], Manifest, Manifest], Any]]] = {
    "a probe": lambda _, pod, c: renamed(c, "livenessProbe", "livenessProb"),
    "a field of a pod": lambda _, pod, c: renamed(
        pod, "terminationGracePeriodSeconds", "gracePeriod"
    ),
    "a port's number": lambda _, pod, c: c["ports"][0].update(containerPort=70000000),
    "a port's name": lambda _, pod, c: c["readinessProbe"]["httpGet"].update(port="helth"),
    "a role": lambda _, pod, c: replaced(c, "decode", "decod"),
    "an option": lambda _, pod, c: replaced(c, "--config=", "--confg="),
    "a setting": lambda _, pod, c: replaced(c, "worker.name=", "worker.nmae="),
    "a value": lambda _, pod, c: replaced(c, "control_address=tcp:", "control_address=tpc:"),
    "a variable": lambda _, pod, c: replaced(c, "$(POD_IP):7001", "$(PODIP):7001"),
    "a setting in the file": lambda objects, pod, c: in_settings(
        objects, "drain_timeout_s", "drain_timout_s"
    ),
    "a section in the file": lambda objects, pod, c: in_settings(objects, "[server]", "[srever]"),
    "a unit in the file": lambda objects, pod, c: in_settings(objects, "8GiB", "8GiBi"),
    "a mount": lambda _, pod, c: c["volumeMounts"][1].update(mountPath="/run/triolet/kyes"),
    "a grace period": lambda _, pod, c: pod.update(terminationGracePeriodSeconds=30),
}


NOTICED: Final = (
    *(kubernetes_validate.ValidationError, ConfigError, typer.TyperException),
    *(KeyError, ValueError, AssertionError),
)


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_is_noticed(typo: str, tmp_path: Path) -> None:
    objects = copy.deepcopy(manifests("overlays/cpu"))
    deployment = named(objects, "Deployment", "decode")
    pod = deployment["spec"]["template"]["spec"]
    TYPOS[typo](objects, pod, pod["containers"][0])
    with pytest.raises(NOTICED):
        check_decode(objects, tmp_path)


def check_decode(objects: list[Manifest], folder: Path) -> None:
    check_schema(named(objects, "Deployment", "decode"))
    (decode,) = (one for one in workloads(objects) if one.name == "decode")
    check_config(decode, folder)
