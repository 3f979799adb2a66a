"""Ranks that other launchers start: on Ray's nodes, and on torchrun's machines in any order."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heterog.errors import HeterogError
from heterog.graph.capture import capture
from heterog.runtime.launch import free_port, run_ranks
from heterog.runtime.measure.detect_hosts import detect_on
from heterog.runtime.ranks.host_places import DEVICE_TYPES, HOST, RankHas, ranks_in_plan
from heterog.runtime.ranks.on_ray import run_on_ray
from heterog.runtime.ranks.ray_nodes import asked_of_nodes, offered
from heterog.runtime.request import RunRequest
from heterog.zoo import load_workload
from tests.ray_nodes import ray_nodes
from tests.runtime.test_launch import MODEL
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("where_models_are")
FAST, SLOW = "V100-SXM2-16GB", "T4"
HOSTS = cluster_of((1.0, [FAST]), (1.0, [SLOW, SLOW]))


def had(*machines: list[str]) -> list[RankHas]:
    return [
        RankHas(machine=number, device=device)
        for number, devices in enumerate(machines)
        for device in devices
    ]


def test_machines_are_the_hosts_whose_devices_they_have() -> None:
    assert ranks_in_plan(HOSTS, had(["Tesla T4", "T4"], ["Tesla V100-SXM2-16GB"])) == [1, 2, 0]
    assert ranks_in_plan(HOSTS, had([FAST], [SLOW, SLOW])) == [0, 1, 2]


def test_processors_stand_for_any_device_in_the_order_of_arrival() -> None:
    assert ranks_in_plan(HOSTS, had([""], ["", ""])) == [0, 1, 2]
    assert ranks_in_plan(HOSTS, had(["", ""], [""])) == [1, 2, 0]
    mixed = cluster_of((1.0, [SLOW, FAST]), (1.0, [SLOW, SLOW]))
    assert ranks_in_plan(mixed, had([SLOW, ""], ["", FAST])) == [2, 3, 0, 1]


def test_fewer_machines_are_the_hosts_that_they_were() -> None:
    """Two of three hosts are alike, and the first of them is lost."""
    alike = cluster_of((1.0, [SLOW]), (1.0, [SLOW]), (1.0, [FAST]))
    left = [RankHas(machine=1, device="", host="C"), RankHas(machine=0, device="", host="B")]
    assert ranks_in_plan(alike, left) == [2, 1]
    assert ranks_in_plan(alike, had([FAST], [SLOW])) == [2, 1]
    with pytest.raises(HeterogError, match="has 1 processor and is no host"):
        ranks_in_plan(alike, [RankHas(machine=0, device="", host="D")])


def test_a_machine_that_is_no_host_is_told_why() -> None:
    with pytest.raises(HeterogError) as caught:
        ranks_in_plan(HOSTS, had(["P100"], [SLOW, SLOW]))
    assert str(caught.value) == (
        "machine 0 of torchrun has 1 P100 and is no host of the plan, or one that is taken: A has "
        "1 V100-16GB; B has 2 T4. Start the plan's hosts, plan for what there is, or name its "
        f"devices in {DEVICE_TYPES}, or its host in {HOST}."
    )
    with pytest.raises(HeterogError, match="machine 1 of torchrun has 1 T4"):
        ranks_in_plan(HOSTS, had([SLOW, SLOW], [SLOW]))


def test_hosts_ask_nodes_in_the_names_that_these_use() -> None:
    named = asked_of_nodes(HOSTS, [{"CPU": 1.0}, {"T4": 2.0}, {"V100": 1.0, "CPU": 8.0}])
    assert named == [{"V100": 1.0}, {"T4": 2.0}]
    gpus = {"GPU": 1.0, "accelerator_type:V100": 1.0}, {"GPU": 4.0, "accelerator_type:T4": 1.0}
    by_gpu = asked_of_nodes(HOSTS, gpus)
    assert by_gpu[1] == {"GPU": 2.0, "accelerator_type:T4": 0.002}


def test_a_host_leaves_the_node_that_another_needs() -> None:
    nodes = [{"T4": 2.0, "V100": 3.0}, {"T4": 9.0}]
    assert len(asked_of_nodes(HOSTS, nodes)) == 2


def test_nodes_that_lack_devices_are_told() -> None:
    with pytest.raises(HeterogError, match="host B, which needs 2 T4; nodes have 1 V100; 1 T4"):
        asked_of_nodes(HOSTS, [{"V100": 1.0}, {"T4": 1.0}])
    alike = cluster_of((1.0, [SLOW]), (1.0, [SLOW]))
    with pytest.raises(HeterogError, match="no node of the Ray cluster is left for host B"):
        asked_of_nodes(alike, [{"T4": 2.0}])  # two hosts on one node would be one host


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    (folder / "model.py").write_text(MODEL)
    graph = capture(load_workload(f"{folder / 'model.py'}:workload", None))
    path = folder / "plan.json"
    make_plan(graph, HOSTS, methods=["model_parallel"], budget="1e").save(path)
    return path


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Four nodes of a Ray cluster, no two of which have the same devices."""
    unlike = ({"T4": 1}, {"T4": 2}, {"P100": 1}, {"V100": 1, "T4": 1})
    with ray_nodes(monkeypatch, *unlike) as made:
        yield made


def devices_of_actors() -> list[dict[str, float]]:
    """The devices of the nodes on which there were actors that start ranks."""
    import ray

    had = {node["NodeID"]: offered({**node, "Alive": True}) for node in ray.nodes()}
    actors = ray._private.state.actors().values()
    found = [had[each["Address"]["NodeID"]] for each in actors if each["ActorClassName"] == "Host"]
    return [{name: each[name] for name in sorted(each) if name != "CPU"} for each in found]


@THOROUGH
@pytest.mark.distributed
def test_ranks_on_rays_nodes_train_as_here(nodes: Any, plan: Path) -> None:
    """They land where the plan says, or it is told what is missing; so are files of clusters."""
    request = RunRequest(plan=plan, num_steps=2)
    assert run_on_ray(request)["losses"] == run_ranks(request)["losses"]
    landed = sorted(devices_of_actors(), key=str)
    assert landed == [{"T4": 1.0, "V100": 1.0}, {"T4": 2.0}], "neither on one T4 nor on the P100"
    found = [sorted(device.type.name for device in each.devices) for each in detect_on("ray")]
    assert sorted(found) == [["P100-12GB"], ["T4"], ["T4", "T4"], ["T4", "V100-16GB"]]
    nodes.remove_node(next(n for n in nodes.worker_nodes if n._ray_params.resources == {"T4": 2}))
    with pytest.raises(HeterogError, match=r"host B, which needs 2 T4; nodes have .*1 P100"):
        run_on_ray(request)


@THOROUGH
@pytest.mark.distributed
def test_torchruns_machines_take_the_places_of_their_devices(plan: Path) -> None:
    """The machine that arrives first has what the plan names last; rounds share no store."""
    two = cluster_of((1.0, [FAST]), (1.0, [SLOW]))
    workload = load_workload(f"{plan.parent / 'model.py'}:workload", None)
    of_two = plan.parent / "two.json"
    make_plan(capture(workload), two, methods=["model_parallel"], budget="1e").save(of_two)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend",
               "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr",
               "127.0.0.1", "-m", "heterog.run", str(of_two)]  # fmt: skip
    alone = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = [
        subprocess.Popen(
            command, env={**alone, DEVICE_TYPES: kind}, stdout=subprocess.PIPE, text=True
        )
        for kind in (SLOW, FAST)
    ]
    slow, fast = (process.communicate(timeout=600)[0] for process in started)
    assert not slow, "the plan's rank 0 tells, which is on the other machine"
    assert json.loads(fast)["losses"][:3] == run_ranks(RunRequest(plan=of_two))["losses"][:3]
