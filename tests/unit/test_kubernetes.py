"""The manifests fit the API's schemas, name each other rightly, and use commands and keys as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from servers import ROOT
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.files import convert

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
VERSIONS = ("1.29", "1.34")


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return dict(document["spec"]["template"]["spec"])


WORKLOADS = [d for d in documents(*FILES) if d["kind"] in ("StatefulSet", "DaemonSet")]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas(version: str) -> None:
    for document in documents(*FILES):
        kubernetes_validate.validate(document, version, strict=True)
    wrong = documents(FOLDER / "agent.yaml")[0]
    wrong["spec"]["template"]["spec"]["terminationGracePeriodSecond"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_coordinators_file_is_one() -> None:
    configuration = next(d for d in documents(*FILES) if d["kind"] == "ConfigMap")
    settings = convert(yaml.safe_load(configuration["data"]["coordinator.yaml"]), CoordinatorSettings)
    assert settings.etcd is not None and len(settings.etcd.endpoints) == 3


@pytest.mark.parametrize("document", WORKLOADS, ids=lambda d: str(d["metadata"]["name"]))
def test_workloads(document: dict[str, Any]) -> None:
    pod = pod_of(document)
    selected = document["spec"]["selector"]["matchLabels"]
    assert selected.items() <= document["spec"]["template"]["metadata"]["labels"].items()
    (main,) = pod["containers"]
    names = {volume["name"] for volume in pod["volumes"]}
    for container in (main, *pod["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= names
    ports = {port["name"] for port in main["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = main[probe]["httpGet"]
        assert asked["port"] in ports
        assert asked["path"] == ("/readyz" if probe == "readinessProbe" else "/healthz")
    assert pod["terminationGracePeriodSeconds"] >= 15


def test_the_agents_options_are_options() -> None:
    from inspect import signature

    from unicron.cli import agent

    words = pod_of(next(d for d in WORKLOADS if d["kind"] == "DaemonSet"))["containers"][0]["command"]
    assert words[:2] == ["unicron", "agent"]
    known = {name.replace("_", "-") for name in signature(agent.main).parameters}
    assert {word.removeprefix("--").partition("=")[0] for word in words[2:]} <= known
    service = next(d for d in documents(*FILES) if d["kind"] == "Service")
    coordinators = next(d for d in WORKLOADS if d["kind"] == "StatefulSet")
    name, replicas = coordinators["metadata"]["name"], coordinators["spec"]["replicas"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    wanted = ",".join(f"{name}-{index}.{host}" for index in range(replicas))
    assert f"--coordinator={wanted}" in words


def test_secrets_hold_what_each_needs_and_no_more() -> None:
    manual = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    has = {}
    for line in manual.splitlines():
        if "create secret generic" in line:
            words = line.split()
            has[words[6]] = {word.rpartition("/")[2] for word in words if word.startswith("--from-file")}
    assert has == {
        "unicron-coordinator-keys": {"coordinator.key", "agent.pub", "client.pub"},
        "unicron-agent-keys": {"agent.key", "worker.key", "coordinator.pub"},
    }
    used = {volume["secret"]["secretName"] for d in WORKLOADS for volume in pod_of(d)["volumes"] if "secret" in volume}
    assert used == set(has)
