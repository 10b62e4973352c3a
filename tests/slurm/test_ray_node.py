from pathlib import Path

from ray._private.parameter import RayParams

from nemorl.slurm.node import Hardware, NodeInfo, Ports
from nemorl.slurm.ray_node import (
    log_tails,
    node_labels,
    object_store_bytes,
    ray_environment,
    start_command,
)
from nemorl.slurm.start import Plan

PLAN = Plan("10.0.0.1", {"n1": Ports(20000, 20099), "n2": Ports(20000, 20099)}, {"n1": "a", "n2": "b"})


def node_info(node: str, gpus: int = 0, domain: str = "", part: str | None = None) -> NodeInfo:
    """Report of a node with 8 cores and 100 GB."""
    return NodeInfo(
        node, "h", "10.0.0.2", "ib0", Hardware(8, 10**11, 5 * 10**10, gpus, domain), (), 100, part
    )


def test_the_head_listens_and_the_others_join() -> None:
    head = start_command(node_info("n1"), PLAN, Path("/tmp/r"), 1000)
    other = start_command(node_info("n2", gpus=4), PLAN, Path("/tmp/r"), 1000)

    assert {"--head", "--port=20000", "--num-cpus=8", "--num-gpus=0", "--block"} <= set(head)
    assert {"--address=10.0.0.1:20000", "--num-gpus=4", "--node-ip-address=10.0.0.2"} <= set(other)
    assert "--head" not in other
    assert not any(word.startswith("--port=") for word in other)


def test_ray_takes_the_ports_of_the_head() -> None:
    words = [
        word.removeprefix("--").partition("=") for word in start_command(node_info("n1"), PLAN, Path("/r"), 1)
    ]
    given = {name.replace("-", "_"): int(port) for name, _, port in words if name.endswith("-port")}
    given["gcs_server_port"] = given.pop("port", 20000)
    given["metrics_agent_port"] = given.pop("dashboard_agent_grpc_port")

    RayParams(**given)  # raises where one is refused


def test_labels_are_name_part_and_domain() -> None:
    assert node_labels(node_info("n1")) == {"nemorl.io/node": "n1", "nemorl.io/part": "cpu"}
    assert node_labels(node_info("n1", 8))["ray.io/gpu-domain"] == "n1"
    assert node_labels(node_info("n1", 4, "abc.1"))["ray.io/gpu-domain"] == "abc.1"
    assert node_labels(node_info("n1", 0, part="gpu"))["nemorl.io/part"] == "gpu"


def test_the_token_is_in_no_environment_and_no_command() -> None:
    environment = ray_environment(
        {
            "RAY_AUTH_TOKEN": "of another cluster",
            "RAY_ADDRESS": "elsewhere:6379",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a Ray on one machine was started before
            "NCCL_SOCKET_IFNAME": "ib1",
        },
        node_info("n1"),
        Path("/run/ray_token"),
    )

    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & environment.keys()
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/ray_token"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert environment["NCCL_SOCKET_IFNAME"] == "ib1"  # set by the user


def test_objects_get_a_tenth_of_the_memory_within_the_shared() -> None:
    gigabyte = 10**9
    assert object_store_bytes(Hardware(8, 100 * gigabyte, 50 * gigabyte, 0, ""), 512, 1) == 10 * gigabyte
    assert object_store_bytes(Hardware(8, 100 * gigabyte, 50 * gigabyte, 0, ""), 512, 2) == 5 * gigabyte
    assert object_store_bytes(Hardware(8, 10**9, 50 * gigabyte, 0, ""), 512, 1) == 512 * 2**20
    assert object_store_bytes(Hardware(8, 100 * gigabyte, gigabyte, 0, ""), 512, 1) == 900_000_000


def test_tails_are_the_ends_of_the_logs_that_say_something(tmp_path: Path) -> None:
    (tmp_path / "raylet.err").write_text("x" * 10_000 + "\nlast words\n")
    (tmp_path / "gcs_server.err").write_text("")
    (tmp_path / "worker-1.out").write_text("of a rank")

    (text,) = log_tails(tmp_path)

    assert text.startswith("=== raylet.err\nxx")
    assert text.endswith("last words")
    assert len(text) < 9_000
