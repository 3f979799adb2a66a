"""Parameters are found again that made the runs, and five runs improve the rest."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.cluster.spec import load_cluster
from heterog.cluster.topology import Execution
from heterog.errors import InputFileError
from heterog.fidelity.run_fit import Case, fit_runs
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.pricing.calibration import cost_model_of, save_run_models
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH

TRUTH = InTraining(products=1.7, fused_attention=1.0, streams=1.5, float32=1.3)
HOST_S = 4.0 * DeviceModels().host.issue_s


@cache
def step(width: int, batch: int, dtype: torch.dtype) -> OpGraph:
    def model() -> nn.Module:  # made when it is captured, where weights are not filled
        layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers).to(dtype)

    data = torch.zeros(batch, width, dtype=dtype), torch.zeros(batch, width, dtype=dtype)
    return capture(
        Workload(model, data, functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="layers")
    )


def cases(cluster: Cluster, truth: DeviceModels, sizes: list[int]) -> list[Case]:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for width in sizes:
            for batch in (64, 8192):
                graph = step(width, batch, dtype)
                strategy = place_layout(parse_layout("dp=2"), graph, cluster).strategy
                case = Case(graph=graph, cluster=cluster, strategy=strategy, measured_s=1.0)
                seconds = case.predicted_s(truth)
                found.append(
                    Case(graph=graph, cluster=cluster, strategy=strategy, measured_s=seconds)
                )
    return found


@THOROUGH
def test_parameters_that_made_the_runs_are_found_again() -> None:
    cluster = cluster_of((100.0, ["A100-80GB", "A100-80GB"]))
    truth = DeviceModels(host_s=HOST_S, in_training={"A100-80GB": TRUTH})
    found = fit_runs(cases(cluster, truth, [512, 4096]), DeviceModels())
    assert np.abs(found.before).max() > 0.3
    assert np.abs(found.after).max() < 0.05
    assert found.models.host.issue_s == pytest.approx(HOST_S, rel=0.2)
    factors = found.models.in_training("A100-80GB")
    assert factors.products == pytest.approx(1.7, rel=0.1)
    assert factors.float32 == pytest.approx(1.3, rel=0.1)
    # No run has attention: nothing is learned of it, and nothing of types that did not run.
    before = DeviceModels().on(cluster)
    assert factors.fused_attention == before.in_training("A100-80GB").fused_attention
    assert found.models.on(cluster).in_training("H100") == before.in_training("H100")


@THOROUGH
def test_a_few_runs_improve_runs_of_other_sizes() -> None:
    cluster = cluster_of((100.0, ["A100-80GB", "A100-80GB"]))
    truth = DeviceModels(host_s=HOST_S, in_training={"A100-80GB": TRUTH})
    models = fit_runs(cases(cluster, truth, [1024]), DeviceModels()).models
    others = cases(cluster, truth, [256, 2048, 8192])
    errors = [
        np.mean([abs(case.predicted_s(each) / case.measured_s - 1.0) for case in others])
        for each in (DeviceModels(), models)
    ]
    assert errors[1] < 0.3 * errors[0]


def pipeline_of_teams(hosts: int, models: DeviceModels) -> Case:
    """Two stages of two devices each: on one host, or on two."""
    cluster = cluster_of(*[(100.0, ["A100-80GB"] * (4 // hosts))] * hosts)
    layout = parse_layout("tp=2,pp=2,micro_batch=32")
    strategy = place_layout(layout, step(64, 64, torch.bfloat16), cluster).strategy
    case = Case(
        graph=step(64, 64, torch.bfloat16), cluster=cluster, strategy=strategy, measured_s=1.0
    )
    return replace(case, measured_s=case.predicted_s(models))


def test_hosts_of_a_pipeline_of_teams_take_longer_by_each_member() -> None:
    # 1 + 0.75 x 2 members = 2.5 times as long, where stages lie on two hosts; else as ever.
    slow = DeviceModels(per_member=0.75)
    assert slow.in_teams(2).host.issue_s == pytest.approx(2.5 * slow.host.issue_s)
    plain, one, two = DeviceModels(), pipeline_of_teams(1, slow), pipeline_of_teams(2, slow)
    assert one.measured_s == one.predicted_s(plain)
    assert two.measured_s > 1.5 * two.predicted_s(plain)
    # What two runs tell of it is found: the host from the one, members from the other.
    found = fit_runs([one, two], plain)
    assert found.models.host.per_member == pytest.approx(0.75, rel=0.15)
    assert np.abs(found.after).max() < 0.05 < np.abs(found.before).max()


def test_one_run_moves_little_and_a_wild_one_breaks_nothing() -> None:
    cluster = cluster_of((100.0, ["A100-80GB", "A100-80GB"]))
    (case, *_) = cases(cluster, DeviceModels(), [512])
    same = fit_runs([case], DeviceModels()).models
    assert same.host.issue_s == pytest.approx(DeviceModels().host.issue_s, rel=1e-3)
    wild = Case(graph=case.graph, cluster=cluster, strategy=case.strategy, measured_s=3600.0)
    found = fit_runs([wild], DeviceModels())
    assert np.isfinite(found.after).all()
    assert found.models.in_training("A100-80GB").spread > 0.3, "it is told that nothing fits"


@pytest.mark.parametrize("execution", list(Execution))
def test_what_was_fitted_prices_a_cluster_that_names_its_file(
    execution: Execution, tmp_path: Path
) -> None:
    models = DeviceModels(execution, host_s=2e-5, per_member=0.4, in_training={"H100": TRUTH})
    save_run_models(tmp_path / "mine.json", models, "mine", 5)
    (tmp_path / "lab.yaml").write_text(
        "schema_version: 1\nname: lab\ncalibration: mine.json\nhosts:\n"
        "  - {name: A, devices: [{type: H100}], nic: {line_rate: 1 Gbit/s}}\n"
    )
    found = cost_model_of(load_cluster(tmp_path / "lab.yaml"))
    assert isinstance(found, DeviceModels)
    assert (found.host.issue_s, found.host.per_member) == (2e-5, 0.4)
    assert found.execution == execution
    assert found.in_training("H100").float32 == 1.3
    assert found.name == "device models, 5 own runs"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"host_s": -1.0}, "host_s"),
        ({"host_s": float("inf")}, "Infinity"),
        ({"per_member": -0.1}, "per_member"),
        ({"execution": "jax"}, "execution"),
        ({"num_runs": 0}, "num_runs"),
        ({"schema_version": 7}, "schema_version 7"),
        ({"more": 1}, "more"),
        ({"types": {"H100": {"products": 0.0}}}, "types"),
        ({"types": {"H100": {"products": 1e-300}}}, "types"),  # kernels that take no time at all
    ],
)
def test_a_broken_file_is_refused_by_field(
    change: dict[str, object], fault: str, tmp_path: Path
) -> None:
    save_run_models(tmp_path / "mine.json", DeviceModels(), "mine", 5)
    document = json.loads((tmp_path / "mine.json").read_text()) | change
    (tmp_path / "mine.json").write_text(json.dumps(document))
    (tmp_path / "lab.yaml").write_text(
        "schema_version: 1\nname: lab\ncalibration: mine.json\nhosts:\n"
        "  - {name: A, devices: [{type: H100}], nic: {line_rate: 1 Gbit/s}}\n"
    )
    with pytest.raises(InputFileError, match=fault):
        cost_model_of(load_cluster(tmp_path / "lab.yaml"))
