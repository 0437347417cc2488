"""Test helper: converts the manifests of ops/kubernetes (for Kubernetes 1.35 to 1.37) to Kubernetes
1.20, which tests can build, and to a tiny model.

`SUBSTITUTIONS` lists all changes, with reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .rendering import manifests

if TYPE_CHECKING:
    from collections.abc import Callable

    from .rendering import Manifest

OVERLAY: Final = "overlays/hpa"
PRE_STOP_S: Final = 5
SETTINGS: Final = {
    'model = "/models/chat"': 'model = "demo"',
    'kv_pool_bytes = "8GiB"': 'kv_pool_bytes = "16MiB"\ndtype = "float32"',
    # Longer than the pauses of a process on a busy machine.
    "[fleet]": (
        "[link]\npeer_timeout_s = 6.0\nprogress_timeout_s = 6.0\nlease_ttl_s = 8.0\n\n[fleet]"
    ),
    "[server.membership.dns]": "[server.membership.dns]\nresolve_s = 0.5\ntimeout_s = 5.0",
}
"""Lines of triolet.toml and their replacements."""


def _budget(one: Manifest) -> None:
    if one["kind"] == "PodDisruptionBudget":
        one["apiVersion"] = "policy/v1beta1"


def _autoscaler(one: Manifest) -> None:
    if one["kind"] == "HorizontalPodAutoscaler":
        one["apiVersion"] = "autoscaling/v2beta2"
        for direction in one["spec"]["behavior"].values():
            direction.pop("tolerance", None)


def _spread(one: Manifest) -> None:
    for constraint in _pod(one).get("topologySpreadConstraints", ()):
        constraint.pop("matchLabelKeys")


def _pre_stop(one: Manifest) -> None:
    for container in _pod(one).get("containers", ()):
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}}


def _volume(one: Manifest) -> None:
    for volume in _pod(one).get("volumes", ()):
        if volume.pop("persistentVolumeClaim", None):
            volume["emptyDir"] = {}


def _size(one: Manifest) -> None:
    for container in _pod(one).get("containers", ()):
        small = {"cpu": "1", "memory": "256Mi"}
        container["resources"] = {"requests": small, "limits": small}
    if one["kind"] == "Deployment":
        one["spec"]["replicas"] = 1


def _probes(one: Manifest) -> None:
    for container in _pod(one).get("containers", ()):
        for name in ("startupProbe", "readinessProbe"):
            container[name]["periodSeconds"] = 1
        # Patient, because a busy machine answers late.
        container["livenessProbe"]["timeoutSeconds"] = 30


def _host(one: Manifest) -> None:
    for container in _pod(one).get("containers", ()):
        if container["args"][0] == "server":
            container["args"].append("--set=server.host=$(POD_IP)")
            source = {"fieldRef": {"fieldPath": "status.podIP"}}
            container["env"].append({"name": "POD_IP", "valueFrom": source})


def _settings(one: Manifest) -> None:
    if one["kind"] == "ConfigMap":
        text = one["data"]["triolet.toml"]
        for old, new in SETTINGS.items():
            assert old in text, old
            text = text.replace(old, new)
        one["data"]["triolet.toml"] = text


SUBSTITUTIONS: Final[dict[str, Callable[[Manifest], None]]] = {
    "policy/v1 came with 1.21": _budget,
    "autoscaling/v2 came with 1.23, tolerance with 1.33": _autoscaler,
    "matchLabelKeys came with 1.25": _spread,
    "preStop.sleep came with 1.29; seconds instead of a quarter of a minute": _pre_stop,
    "nothing is mounted, and the demo model is in the package": _volume,
    "one pod of each role, for a tiny model": _size,
    "probes each second, with patience": _probes,
    "pods share one network namespace, so a server takes its own address only": _host,
    "a tiny model, patient links": _settings,
}
"""Changes by reason."""


def overlay_for_1_20() -> list[Manifest]:
    """Return the manifests for the tests' API server."""
    objects = manifests(OVERLAY)
    for one in objects:
        for change in SUBSTITUTIONS.values():
            change(one)
    # The tests have no metrics of processor time.
    return [
        one
        for one in objects
        if (one["kind"], one["metadata"]["name"]) != ("HorizontalPodAutoscaler", "server")
    ]


def _pod(one: Manifest) -> Manifest:
    if one["kind"] != "Deployment":
        return {}
    pod = one["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod
