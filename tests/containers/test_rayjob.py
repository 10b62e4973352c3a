"""The manifest for Kubernetes: its fields, and that it agrees with itself, the image and its experiment."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.slurm.ray_node import PART
from tests.containers.dockerfiles import CONTAINERS, versions
from tests.containers.rayjob_schema import RAY_JOB

TEXT = (CONTAINERS / "kubernetes" / "rayjob.yaml").read_text(encoding="utf-8")
CLAIM = yaml.safe_load((CONTAINERS / "kubernetes" / "volume.yaml").read_text(encoding="utf-8"))
CONFIG, JOB = yaml.safe_load_all(TEXT)
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS = {
    "submitter": JOB["spec"]["submitterPodTemplate"]["spec"],
    "head": CLUSTER["headGroupSpec"]["template"]["spec"],
    **{name: group["template"]["spec"] for name, group in GROUPS.items()},
}
EXPERIMENT = yaml.safe_load(CONFIG["data"]["experiment.yaml"])


def problems(schema: dict[str, Any], job: object) -> list[str]:
    """What a schema says against a manifest."""
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(job)]


def test_its_fields_are_those_of_a_ray_job() -> None:
    assert problems(RAY_JOB, JOB) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/backofLimit", 3),
        ("spec/rayClusterSpec/rayVersion", 2.6),
        ("spec/rayClusterSpec/headGroupSpec/rayStartParams/num-cpus", 0),
        ("spec/rayClusterSpec/headGroupSpec/template/spec/securityContext/runAsUser", 0),
        ("spec/submissionMode", "Sidecar"),
    ],
)
def test_the_schema_refuses_what_is_wrong(path: str, value: object) -> None:
    job = copy.deepcopy(JOB)
    *folders, name = path.split("/")
    place = job
    for folder in folders:
        place = place[folder]
    place[name] = value
    assert problems(RAY_JOB, job)


def test_the_definition_of_kuberay_takes_it() -> None:
    path = os.environ.get("NEMORL_KUBERAY_CRD")
    if path is None:
        pytest.skip(
            "NEMORL_KUBERAY_CRD does not name KubeRay's ray.io_rayjobs.yaml, which is not part of nemorl"
        )
    definition = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    assert problems(schema, JOB) == []
    assert problems(schema, JOB | {"spec": JOB["spec"] | {"backofLimit": 3}})


def close(schema: object) -> None:
    """Refuse the fields that Kubernetes would drop in silence, and take quantities that are numbers."""
    if isinstance(schema, list):
        for one in schema:
            close(one)
    elif isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema.pop("type", None)
        for name, one in schema.items():
            close(list(one.values()) if name == "properties" else one)


def test_the_driver_resumes_from_a_checkpoint_of_the_previous_run() -> None:
    words = JOB["spec"]["entrypoint"].split()
    assert words[:2] == ["nemorl", "train"]
    assert "--resume" in words
    assert JOB["spec"]["backoffLimit"] > 0
    assert CLUSTER["authOptions"] == {"mode": "token"}


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every container, after its pod's name."""
    for name, pod in PODS.items():
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            yield name, container


def test_all_run_one_image_as_its_user() -> None:
    assert len({container["image"] for _, container in containers()}) == 1
    assert {pod["securityContext"]["runAsUser"] for pod in PODS.values()} == {10001}
    assert "ID=10001" in (CONTAINERS / "system.sh").read_text(encoding="utf-8")
    assert CLUSTER["rayVersion"] == versions("base.txt")["ray"]


def test_what_is_mounted_is_there() -> None:
    for name, container in containers():
        mounted = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        assert mounted.keys() <= {volume["name"] for volume in PODS[name].get("volumes", [])}
        if name != "submitter":
            assert mounted == {"runs": "/runs", "experiment": "/experiment", "shared-memory": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in PODS["head"]["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert volumes["experiment"]["configMap"]["name"] == CONFIG["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_experiment_lies_where_the_driver_looks_and_writes_where_all_nodes_see_it() -> None:
    assert JOB["spec"]["entrypoint"].split()[2] == f"/experiment/{next(iter(CONFIG['data']))}"
    assert EXPERIMENT["run_dir"].startswith("/runs/")
    assert EXPERIMENT["policy"]["model_path"].startswith("/runs/")


def test_the_experiment_is_one(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(CONFIG["data"]["experiment.yaml"])
    assert load_experiment(path).cluster.num_nodes == 4


def test_the_experiment_and_the_cluster_agree() -> None:
    cluster, gpu = EXPERIMENT["cluster"], GROUPS["gpu"]
    assert cluster["num_nodes"] == 1 + sum(group["replicas"] for group in GROUPS.values())  # 1: the head
    [worker], [doctor] = gpu["template"]["spec"]["containers"], gpu["template"]["spec"]["initContainers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == cluster["gpus_per_node"]
    assert doctor["args"] == ["doctor", "--brief", "--gpus", str(cluster["gpus_per_node"])]
    layout, generation = EXPERIMENT["policy"]["layout"], EXPERIMENT["generation"]
    policy = layout["tensor_parallel_size"] * layout["data_parallel_size"]
    engines = generation["replicas"] * generation["tensor_parallel_size"]
    assert policy + engines == gpu["replicas"] * cluster["gpus_per_node"]
    for group in GROUPS.values():
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


def test_labels_are_those_of_the_groups() -> None:
    offered = [group["labels"] for group in GROUPS.values()]
    assert {name for labels in offered for name in labels} == {PART}
    assert all(labels in offered for labels in EXPERIMENT["cluster"]["labels"].values())
