"""Tests of the manifests with a real control plane and real processes: a fleet starts, is rolled
out, scales and loses a node. Run by `make k8s-test`."""

from __future__ import annotations

import copy
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest

from tests.end_to_end.tenants import OPERATOR, headers_of
from tests.house.test_layout import ROOT
from tests.packaging.shown import shown
from transport.zmq_curve import make_keys

from .cluster import Cluster, Portal, prepare_network, under_load, until
from .control_plane import BIN, quiet
from .rendering import kubectl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .control_plane import Json

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

COMMAND_S: Final = 120.0
ROLES: Final = ("prefill", "decode", "server")
MAX_ROLLOUTS: Final = 10
"""Most rollouts until a stream must have failed with a broken kubelet; each takes about half a
minute."""


@pytest.fixture(scope="module")
def portal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    """A cluster in which all roles are ready."""
    if not (BIN / "etcd").exists():
        pytest.skip(
            "the control plane is not built: `make k8s-test` builds it and runs these tests"
        )
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.skip("this network is not the tests' own: `make k8s-test` runs them in one")
    # By default the first process of a namespace ignores this signal, and nothing would end the
    # processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tmp_path_factory.mktemp("k8s")
    prepare_network(folder)
    with Portal(folder).running() as portal:
        portal.do(portal.cluster.wait_rolled_out, *ROLES)
        yield portal


@pytest.fixture
def cluster(portal: Portal) -> Cluster:
    return portal.cluster


def test_a_fleet_comes_up_and_answers(portal: Portal, cluster: Cluster) -> None:
    async def change_nothing() -> None:
        pass

    load = portal.do(under_load, cluster, change_nothing)
    assert load.failures == []
    assert load.is_exact


PAGE: Final = "docs/operations/kubernetes.md"
ANOTHER: Final = "page"
"""Namespace for the objects that the page creates."""
NOT_FOR_1_20: Final = ("kubectl apply -k chat",)


def test_the_commands_of_the_page_are_taken(
    portal: Portal, cluster: Cluster, tmp_path: Path
) -> None:
    """The commands in the page's code blocks, of kubectl and triolet."""
    environment = quiet() | {"KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}
    environment["PATH"] = f"{Path(kubectl()).parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    (tmp_path / "url").write_text("redis://:PASSWORD@redis.default:6379/0")
    commands = [one.text.strip() for one in shown(PAGE)]
    page_text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert len(commands) >= 9
    for command in commands:
        if command.startswith(NOT_FOR_1_20):
            continue
        text = command.replace("namespace triolet", f"namespace {ANOTHER}")
        text += f" --namespace={ANOTHER}" if " secret " in command else ""
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{text}: {done.stderr}"
        if "rollout status" in command:
            words = done.stdout.splitlines()[-1]
            assert f"`{words}`" in page_text


async def roll_all(cluster: Cluster, version: str, *names: str) -> None:
    for name in names:
        await cluster.roll_out(name, version)
    await cluster.wait_rolled_out(*names)


def test_a_rollout_of_every_role_fails_no_stream(portal: Portal, cluster: Cluster) -> None:
    load = portal.do(under_load, cluster, lambda: roll_all(cluster, "2", *ROLES))
    assert load.failures == []
    assert load.is_exact


@pytest.mark.parametrize("what", ["readiness", "pre_stop", "grace"])
def test_streams_fail_where_a_kubelet_ignores_it(
    portal: Portal, cluster: Cluster, what: str
) -> None:
    """A request must arrive within a few seconds, so one rollout may not be enough."""
    failures: list[str] = []
    try:
        for kubelet in cluster.kubelets:
            setattr(kubelet.ignored, what, True)
        for number in range(MAX_ROLLOUTS):
            change = partial(roll_all, cluster, f"{what}-{number}", "server")
            failures += portal.do(under_load, cluster, change).failures
            if failures:
                break
    finally:
        for kubelet in cluster.kubelets:
            setattr(kubelet.ignored, what, False)
    assert failures


def test_the_autoscaler_follows_the_desired_number_and_no_stream_fails(
    portal: Portal, cluster: Cluster
) -> None:
    async def change() -> None:
        await cluster.scale("decode", 3)
        await cluster.scale("decode", 1)

    load = portal.do(under_load, cluster, change)
    assert load.failures == []
    assert load.is_exact


def test_a_worker_that_is_killed_while_it_drains_costs_no_stream(
    portal: Portal, cluster: Cluster
) -> None:
    async def change() -> None:
        await cluster.scale("decode", 2)
        [pod, _] = await cluster.pods("decode")
        _, process = cluster.process(pod)
        await cluster.api.call("DELETE", pod_path(pod))
        await until(lambda: has_logged(process.log, '"SIGTERM"'))
        process.kill()
        await cluster.wait_rolled_out("decode")
        await cluster.scale("decode", 1)

    load = portal.do(under_load, cluster, change)
    assert load.failures == []
    assert load.is_exact


async def has_logged(log: Path, text: str) -> bool:
    return text in log.read_text()  # noqa: ASYNC240


def pod_path(pod: Json) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def test_pods_without_the_model_say_so_and_the_old_ones_stay(
    portal: Portal, cluster: Cluster
) -> None:
    words: list[str] = []

    async def change() -> None:
        pod = (await cluster.deployment("decode"))["spec"]["template"]["spec"]
        broken = copy.deepcopy(pod)
        broken["containers"][0]["args"].append("/models/nothing")
        await cluster.change_pods("decode", broken)
        await until(lambda: ends(cluster, "decode", words))
        await cluster.change_pods("decode", pod)
        await cluster.wait_rolled_out("decode")

    load = portal.do(under_load, cluster, change)
    assert load.failures == []
    assert "triolet: " in words[0]
    assert "/nothing" in words[0]


async def ends(cluster: Cluster, name: str, words: list[str]) -> bool:
    """Return whether a pod's container has ended, and record the end of its output."""
    for pod in await cluster.pods(name):
        for status in pod["status"].get("containerStatuses", ()):
            if ended := status["lastState"].get("terminated"):
                words.append(ended["message"])
    return bool(words)


def test_a_worker_with_a_key_of_its_own_is_not_used_and_is_named(
    portal: Portal, cluster: Cluster, tmp_path: Path
) -> None:
    make_keys(keys := tmp_path / "keys")
    seen: list[str] = []

    async def change() -> None:
        await cluster.secret("wrong-keys", [keys / "key.secret", keys / "key.public"])
        pod = (await cluster.deployment("decode"))["spec"]["template"]["spec"]
        wrong = copy.deepcopy(pod)
        [volume] = (one for one in wrong["volumes"] if one["name"] == "keys")
        volume["secret"]["secretName"] = "wrong-keys"
        await cluster.change_pods("decode", wrong)
        await until(lambda: is_unready(cluster, seen))
        await cluster.change_pods("decode", pod)
        await cluster.wait_rolled_out(*ROLES)

    portal.do(change)
    assert "ends the handshake: it may have a key" in seen[0]


async def is_unready(cluster: Cluster, seen: list[str]) -> bool:
    """Return whether the server is not ready, and record its reason."""
    [pod] = await cluster.pods("server")
    url = f"http://{pod['status']['podIP']}:8000/health/ready"
    async with httpx2.AsyncClient() as client:
        answer = await client.get(url, headers=headers_of(OPERATOR))
    if not answer.is_success and "key" in answer.text:
        seen.append(answer.text)
    return bool(seen)


def test_a_lost_node_is_replaced_and_its_streams_go_on(portal: Portal, cluster: Cluster) -> None:
    async def change() -> None:
        await cluster.scale("decode", 2)
        [server] = await cluster.pods("server")
        lost = next(
            one["spec"]["nodeName"]
            for one in await cluster.pods("decode")
            if one["spec"]["nodeName"] != server["spec"]["nodeName"]
        )
        [kubelet] = (one for one in cluster.kubelets if one.name == lost)
        kubelet.lose()
        await until(lambda: is_elsewhere(cluster, lost))

    load = portal.do(under_load, cluster, change)
    assert load.failures == []
    assert load.is_exact


async def is_elsewhere(cluster: Cluster, lost: str) -> bool:
    """Return whether all workers are ready on other nodes."""
    for name, number in (("prefill", 1), ("decode", 2)):
        pods: list[Any] = [one for one in await cluster.pods(name) if is_ready(one)]
        if len([one for one in pods if one["spec"]["nodeName"] != lost]) != number:
            return False
    return True


def is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
