"""Tests of the objects in ops/kubernetes for autoscalers and LeaderWorkerSet."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import promql_parser
import pytest
import yaml

from triolet.config import ServerConfig

from .rendering import KUBERNETES, OVERLAYS, WHOLE, Manifest, manifests, named, workloads
from .test_manifests import GROUPS_OF_KUBERNETES, check_schema

pytestmark = pytest.mark.slow

SCHEMAS: Final = Path(__file__).parent / "schemas"
METRIC: Final = "triolet_desired_workers"
OF_PROMETHEUS_TRIGGER: Final = {
    *("serverAddress", "query", "queryParameters", "threshold", "activationThreshold"),
    *("namespace", "customHeaders", "ignoreNullValues", "unsafeSsl", "timeout"),
}
"""Fields of a Prometheus trigger in KEDA 2.20, which the schema of a ScaledObject leaves open."""
SCALED: Final = [name for name in OVERLAYS if any(word in name for word in ("hpa", "keda"))]
"""Autoscaled overlays, and their parts that are applied one by one."""


@cache
def schema_of(kind: str) -> Manifest:
    """Return a schema that refuses unknown fields, as an API server does."""
    text = (SCHEMAS / f"{kind.lower()}.yaml").read_text(encoding="utf-8")
    schema = closed(yaml.safe_load(text))
    assert isinstance(schema, dict)
    return schema


def closed(schema: Any) -> Any:  # noqa: ANN401 (any JSON)
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in inner or "properties" not in inner
    return inner if is_open else {**inner, "additionalProperties": False}


@pytest.mark.parametrize("overlay", WHOLE)
def test_objects_of_others_fit_their_schemas(overlay: str) -> None:
    for one in manifests(overlay):
        if one["apiVersion"] not in GROUPS_OF_KUBERNETES:
            jsonschema.validate(one, schema_of(one["kind"]))


def test_an_unknown_field_is_refused() -> None:
    one = named(manifests("overlays/keda"), "ScaledObject", "decode")
    one["spec"]["maxReplicaCont"] = one["spec"].pop("maxReplicaCount")
    with pytest.raises(jsonschema.ValidationError, match="maxReplicaCont"):
        jsonschema.validate(one, schema_of("ScaledObject"))


def test_a_disaggregated_set_has_the_pods_of_the_deployments_that_it_replaces() -> None:
    objects, replaced = manifests("overlays/disaggregated"), manifests("overlays/gpu")
    roles = named(objects, "DisaggregatedSet", "triolet")["spec"]["roles"]
    assert [role["name"] for role in roles] == ["prefill", "decode"]
    for role in roles:
        template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        assert template == named(replaced, "Deployment", role["name"])["spec"]["template"]
        check_schema({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
    deployments = [one for one in objects if one["kind"] == "Deployment"]
    assert [one["metadata"]["name"] for one in deployments] == ["server"]


def labels_asked_for(scaler: Manifest) -> tuple[str, dict[str, str]]:
    """Return the metric that an autoscaler follows and the labels by which it selects series."""
    if scaler["kind"] == "ScaledObject":
        (trigger,) = scaler["spec"]["triggers"]
        assert trigger["metadata"].keys() <= OF_PROMETHEUS_TRIGGER
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        assert trigger["metadata"]["threshold"] == "1"
        found = promql_parser.parse(trigger["metadata"]["query"])
        assert isinstance(found, promql_parser.AggregateExpr)
        selected = found.expr
        assert isinstance(selected, promql_parser.VectorSelector)
        return str(selected.name), {m.name: m.value for m in selected.matchers.matchers}
    (external,) = (one["external"] for one in scaler["spec"]["metrics"])
    assert external["target"] == {"type": "AverageValue", "averageValue": "1"}
    return external["metric"]["name"], external["metric"]["selector"]["matchLabels"]


@pytest.mark.parametrize("overlay", SCALED)
def test_an_autoscaler_follows_the_desired_number_of_the_workers_that_it_scales(
    overlay: str, tmp_path: Path
) -> None:
    objects = manifests(overlay)
    found = {one.name: one for one in workloads(objects)}
    configs = [one.config(tmp_path) for one in found.values()]
    servers = [one for one in configs if isinstance(one, ServerConfig)]
    assert all(one.scale.redis.url for one in servers), "`triolet scale` writes the number there"
    scaled = []
    for one in objects:
        if one["kind"] not in ("ScaledObject", "HorizontalPodAutoscaler"):
            continue
        target = one["spec"]["scaleTargetRef"]["name"]
        scaled.append(target)
        assert "replicas" not in named(objects, "Deployment", target)["spec"], "two writers"
        if target.startswith("server"):
            continue
        zone = {v["name"]: v for v in found[target].container["env"]}["ZONE"]["value"]
        [name] = {one.model_name for one in servers}
        wanted = {"model": name, "role": str(found[target].role), "zone": zone}
        assert labels_asked_for(one) == (METRIC, wanted)
        advanced = one["spec"].get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
        behavior = one["spec"].get("behavior") or advanced["behavior"]
        exact = {"stabilizationWindowSeconds": 0, "tolerance": "0"}
        assert behavior == {"scaleUp": exact, "scaleDown": exact}
    assert sorted(scaled) == sorted(found)


def test_the_adapter_gives_an_autoscaler_one_value_however_many_servers_export_it() -> None:
    text = (KUBERNETES / "components/hpa/adapter_rules.yaml").read_text(encoding="utf-8")
    [rule] = yaml.safe_load(text)["externalRules"]
    assert rule["resources"] == {"namespaced": False}, "series have no label of a namespace"
    for part in (rule["seriesQuery"], rule["metricsQuery"].replace("<<.LabelMatchers>>", "")):
        found = promql_parser.parse(part)
        series = found.expr if isinstance(found, promql_parser.AggregateExpr) else found
        assert isinstance(series, promql_parser.VectorSelector)
        assert series.name == METRIC
    assert str(found.op) == "max"
    assert found.modifier is None
