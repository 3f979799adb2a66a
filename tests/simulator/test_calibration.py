"""Calibration: what it fits to measurements of a known law, and what it says about them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterog.cluster import Cluster, device_type
from heterog.cluster.topology import Execution
from heterog.errors import ClusterError, InputFileError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import Channel, ChannelKind, ChannelTable
from heterog.lowering.tables import graph_tables
from heterog.pricing.calibration import (
    Calibration,
    calibrate,
    extrapolated_by,
    fit_links,
    link_error,
)
from heterog.pricing.cost_model import alpha_beta
from heterog.pricing.op_fits import (
    LinkMeasurement,
    Measurements,
    OpMeasurement,
    fit_kind,
    held_out_error,
    merge,
    op_kind,
    op_signature,
)
from heterog.pricing.roofline import Roofline
from heterog.runtime.ranks.testbed import load_testbed
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of, linear_chain

T4 = device_type("T4")
LAW = (20e-6, 2e-13, 5e-12)
"""Seconds, seconds per FLOP, seconds per byte of the devices in these tests."""
PAYLOADS = (4_000, 64_000, 512_000, 1_000_000_000)


def law(flops: Any, num_bytes: Any) -> Any:
    return LAW[0] + LAW[1] * flops + LAW[2] * num_bytes


def row(
    graph: OpGraph, op: int, samples: int, seconds: float | None = None, kind: str = ""
) -> OpMeasurement:
    plan = batch_plan(graph)
    flops = float(plan.flops_fixed[op] + samples * plan.flops_per_sample[op])
    num_bytes = float(plan.bytes_fixed[op] + samples * plan.bytes_per_sample[op])
    return OpMeasurement(
        device_type="T4",
        model=graph.name,
        signature=op_signature(graph, op),
        kind=kind or op_kind(graph, op),
        samples=samples,
        flops=flops,
        num_bytes=num_bytes,
        seconds=law(flops, num_bytes) if seconds is None else seconds,
        count=1,
    )


def measured(*graphs: OpGraph, samples: Sequence[int] = (2, 4, 8)) -> Measurements:
    ops = [row(graph, op, n) for graph in graphs for op in range(graph.num_ops) for n in samples]
    return Measurements(environment={"torch": "none"}, ops=tuple(ops))


def sizes(graph: OpGraph, samples: int) -> Any:
    plan = batch_plan(graph)
    return np.array(
        [
            law(*pair)
            for pair in zip(
                plan.flops_fixed + samples * plan.flops_per_sample,
                plan.bytes_fixed + samples * plan.bytes_per_sample,
                strict=True,
            )
        ]
    )


# --- ops ---------------------------------------------------------------------------------------


def test_a_linear_law_is_found_and_holds_at_other_sizes() -> None:
    rng = np.random.default_rng(0)
    flops, num_bytes = 10 ** rng.uniform(6, 9, 30), 10 ** rng.uniform(4, 7, 30)
    seconds = np.array([law(f, b) for f, b in zip(flops, num_bytes, strict=True)])
    fit = fit_kind(flops, num_bytes, seconds)
    assert fit.coefficients == pytest.approx(LAW, rel=1e-3)
    elsewhere, distance = fit.seconds(np.array([3e10]), np.array([2e8]))
    assert elsewhere[0] == pytest.approx(law(3e10, 2e8), rel=1e-3)
    assert distance[0] > math.log(3.0)


def test_ops_far_around_a_law_are_the_law_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    flops, num_bytes = np.tile(10 ** rng.uniform((6, 4), (9, 7), (30, 2)).T, 2)
    seconds = law(flops, num_bytes) * np.repeat([0.1, 1.9], 30)
    found = fit_kind(flops, num_bytes, seconds, is_of_many=True)
    assert found.coefficients == pytest.approx(LAW, rel=1e-3)


def test_ops_of_many_kinds_are_their_fit_in_the_mean() -> None:
    """Also where errors relative to the fit before alone would go to and fro between two."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        num = int(rng.integers(3, 60))
        flops = 10 ** rng.uniform(3, 12, num) * (rng.random(num) > 0.3)
        num_bytes = 10 ** rng.uniform(3, 10, num)
        law = 5e-6 + flops / 1e13 + num_bytes / 1e12
        seconds = law * np.exp(rng.normal(0, 1, num))
        fit = fit_kind(flops, num_bytes, seconds, is_of_many=True)
        ratios = np.exp(np.array(fit.log_ratio))
        assert ratios.mean() == pytest.approx(1.0, abs=0.01)


def test_ops_of_a_model_that_was_never_measured_follow_the_law() -> None:
    known = [linear_chain(width=width) for width in (256, 512, 2048)]
    new = linear_chain(width=1024)
    model = calibrate(measured(*known))
    for samples in (2, 3, 8):
        predicted = model.op_seconds(new, T4, samples)
        assert predicted == pytest.approx(sizes(new, samples), rel=1e-2)


def test_a_curve_is_exact_where_it_was_measured_and_straight_between() -> None:
    graph = linear_chain()
    seconds = {2: 1e-3, 8: 4e-3}
    rows = tuple(row(graph, 0, samples, seconds[samples]) for samples in seconds)
    model = calibrate(Measurements(environment={}, ops=rows))
    assert [model.op_seconds(graph, T4, n)[0] for n in (2, 4, 8)] == pytest.approx(
        [1e-3, 2e-3, 4e-3]
    )


def test_a_kind_that_was_never_measured_is_extrapolated_and_takes_time() -> None:
    graph = linear_chain()
    rows = [row(graph, op, 8) for op in range(graph.num_ops) if graph.ops[op].kind != "update"]
    model = calibrate(Measurements(environment={}, ops=tuple(rows)))
    updates = [op for op, _, _ in graph.updates]
    seconds, is_far = model._op_seconds(graph, T4, 8)
    assert np.flatnonzero(is_far & (seconds > 0)).tolist() == updates
    assert (seconds[updates] > 0).all()


def test_a_device_type_that_was_never_measured_keeps_its_roofline() -> None:
    graph, other = linear_chain(), device_type("V100-16GB")
    model = calibrate(measured(graph))
    assert (model.op_seconds(graph, other, 4) == Roofline().op_seconds(graph, other, 4)).all()
    assert model.copy_seconds(other) == Roofline().copy_seconds(other)
    seconds, is_far = model._op_seconds(graph, other, 4)
    assert is_far[seconds > 0].all()


def test_copies_follow_their_own_law() -> None:
    graph = linear_chain()
    copies = [
        replace(row(graph, 0, 1, 1e-5 + 1e-10 * size, kind="copy"), flops=0.0, num_bytes=size)
        for size in (1e3, 1e5, 1e7)
    ]
    found = measured(graph)
    model = calibrate(replace(found, ops=(*found.ops, *copies)))
    assert model.copy_seconds(T4) == pytest.approx((1e-5, 1e-10), rel=1e-3)


def test_held_out_errors_are_small_where_the_law_holds_and_not_where_it_does_not() -> None:
    graphs = [linear_chain(width=width) for width in range(256, 2049, 256)]
    rows = [
        replace(each, model=f"width {graph.ops[0].flops}")
        for graph in graphs
        for each in measured(graph).ops
    ]
    of_ops, of_models = held_out_error(rows)
    assert of_ops is not None
    assert of_models is not None
    assert max(of_ops, of_models) < 0.02
    rng = np.random.default_rng(1)
    noisy = [replace(each, seconds=each.seconds * rng.uniform(0.5, 2.0)) for each in rows]
    assert (held_out_error(noisy)[0] or 0.0) > 0.1
    assert held_out_error(measured(graphs[0]).ops)[1] is None, "one model cannot be left out"


def test_the_part_that_was_never_measured_is_known_as_well_as_by_a_roofline() -> None:
    graphs = [linear_chain(width=width) for width in (256, 512, 1024)]
    ops = [replace(each, model=f"{g.fingerprint}") for g in graphs for each in measured(g).ops]
    graph, roofline = graphs[1], Roofline().spread(graphs[1], T4)
    whole = calibrate(Measurements(environment={}, ops=tuple(ops)))
    assert whole.spread(graph, T4) == pytest.approx(0.05, abs=0.01)
    heavy = max(range(graph.num_ops), key=lambda op: graph.flops[op])
    kept = tuple(each for each in ops if each.kind != op_kind(graph, heavy))
    part = calibrate(Measurements(environment={}, ops=kept))
    seconds = np.where(graph.is_view, 0.0, sizes(graph, graph.batch_size))
    missing = [op_kind(graph, op) == op_kind(graph, heavy) for op in range(graph.num_ops)]
    share = seconds[missing].sum() / seconds.sum()
    assert 0.1 < share < 0.9
    expected = math.hypot(whole.spread(graph, T4), share * roofline)
    assert part.spread(graph, T4) == pytest.approx(expected, rel=0.02)


def test_nothing_to_fit() -> None:
    with pytest.raises(InputFileError, match="hold no op; run 'heterog profile' first"):
        calibrate(Measurements(environment={}, ops=()))


# --- plans --------------------------------------------------------------------------------------


def strategy(graph: OpGraph, cluster: Cluster, shares: tuple[int, ...]) -> Strategy:
    decision = Decision(devices=tuple(range(len(shares))), shares=shares)
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(decision,) * graph_tables(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
    )


def test_what_a_plan_extrapolates_is_weighed_by_its_seconds() -> None:
    graph, cluster = linear_chain(), cluster_of((1.0, ["T4", "T4"]))
    chosen = strategy(graph, cluster, (6, 2))
    assert extrapolated_by(calibrate(measured(graph)), graph, cluster, chosen) == {}
    rows = [row(graph, op, 8) for op in range(graph.num_ops) if graph.ops[op].kind != "update"]
    model = calibrate(Measurements(environment={}, ops=tuple(rows)))
    found = extrapolated_by(model, graph, cluster, chosen)
    updates = [op for op, _, _ in graph.updates]
    seconds = [model.op_seconds(graph, T4, samples) for samples in (6, 2)]
    expected = sum(each[updates].sum() for each in seconds) / sum(each.sum() for each in seconds)
    assert found["update.Adam"] == pytest.approx(expected)


def test_a_cluster_that_names_a_calibration_is_planned_with_it(tmp_path: Path) -> None:
    graph = linear_chain()
    path = tmp_path / "lab.json"
    calibrate(measured(graph), name="lab of today").save(path)
    (tmp_path / "lab.yaml").write_text(
        "schema_version: 1\nname: lab\ncalibration: lab.json\nhosts:\n"
        "  - {name: a, devices: [{type: T4, count: 2}], intra: pcie3}\n"
    )
    cluster = Cluster.load(tmp_path / "lab.yaml")
    evaluator = Evaluator(graph, cluster)
    assert isinstance(evaluator.cost_model, Calibration)
    predicted = evaluator.cost_model.op_seconds(graph, T4, 4)
    assert predicted == pytest.approx(sizes(graph, 4))
    assert make_plan(graph, cluster, methods=["ddp"], budget="5e").calibration == "lab of today"
    (tmp_path / "other.yaml").write_text(
        (tmp_path / "lab.yaml").read_text().replace("lab.json", "no.json")
    )
    with pytest.raises(InputFileError, match=r"no\.json"):
        Evaluator(graph, Cluster.load(tmp_path / "other.yaml"))


# --- links --------------------------------------------------------------------------------------

KINDS = (ChannelKind.ALL_REDUCE_RING, ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER)


def channels(cluster: Cluster) -> list[Channel]:
    """All transfers and the collectives over all devices."""
    table, everyone = ChannelTable(cluster), tuple(range(cluster.num_devices))
    even = (1,) * cluster.num_devices
    numbers = [
        table.all_reduce(everyone, hierarchical=False),
        table.reduce_scatter(everyone, even),
        table.all_gather(everyone, even),
    ]
    every = [table[number] for number in range(len(table))]
    transfers = [each for each in every if each.kind == ChannelKind.POINT_TO_POINT]
    between = [each for each in transfers if each.devices[0] != each.devices[1]]
    return between + [table[number] for number in numbers]


def transferred(
    cluster: Cluster,
    rates: dict[str, float],
    factors: dict[ChannelKind, tuple[float, float]] | None = None,
    cpu_s_per_byte: float = 0.0,
) -> list[LinkMeasurement]:
    """Measurements that follow the alpha-beta model over given rates and factors."""
    rows = []
    for channel in channels(cluster):
        cost = alpha_beta(cluster, channel, rates)
        latency, per_byte = (factors or {}).get(channel.kind, (1.0, 1.0))
        is_sliced = channel.kind in (ChannelKind.REDUCE_SCATTER, ChannelKind.ALL_GATHER)
        for payload in PAYLOADS:
            seconds = latency * cost.latency_s + per_byte * payload * cost.seconds_per_byte
            rows.append(
                LinkMeasurement(
                    kind=channel.kind.name.lower(),
                    devices=tuple(cluster.devices[device].name for device in channel.devices),
                    slices=(1,) * len(channel.devices) if is_sliced else (),
                    num_bytes=payload,
                    seconds=seconds,
                    device_seconds=(cpu_s_per_byte * payload,) * len(channel.devices),
                )
            )
    return rows


def slowed(cluster: Cluster, **part_of_host: float) -> dict[str, float]:
    """Rates of all links, by the part that their host reaches of its nominal rate."""
    return {
        link.name: link.bandwidth_bytes_per_s * part_of_host[cluster.hosts[link.host_index].name]
        for link in cluster.resources
    }


def test_the_rate_of_the_slowest_link_on_the_way_is_found() -> None:
    cluster = load_testbed("skew_both")  # 200, 100 and 50 Mbit/s
    true = slowed(cluster, a=0.5, b=0.8, c=0.9)
    nominal = {link.name: link.bandwidth_bytes_per_s for link in cluster.resources}
    # As fast as the true ones wherever they decide: a's NIC still is no transfer's slowest link.
    rates = fit_links(
        transferred(cluster, {**true, **slowed(cluster, a=1, b=0.8, c=0.9)}), cluster
    )
    for name, found in rates.rates.items():
        part = {"a": (0.8 + 0.9) / 2, "b": 0.8, "c": 0.9}[name[0]]
        if "nic" in name:
            assert found == pytest.approx(part * nominal[name], rel=1e-3), name


def test_factors_of_every_kind_and_the_drag_are_found() -> None:
    cluster = load_testbed("skew_both")
    factors = {
        ChannelKind.POINT_TO_POINT: (5.0, 1.0),
        ChannelKind.ALL_REDUCE_RING: (2.0, 1.3),
        ChannelKind.REDUCE_SCATTER: (4.0, 0.9),
        ChannelKind.ALL_GATHER: (3.0, 1.1),
    }
    rates = slowed(cluster, a=1, b=1, c=1)
    rows = transferred(cluster, rates, factors, cpu_s_per_byte=2e-10)
    fit = fit_links(rows, cluster)
    for kind, (latency, per_byte) in factors.items():
        found = fit.factors[kind.name.lower()]
        assert found[1] == pytest.approx(per_byte, rel=1e-2), kind
        assert found[0] == pytest.approx(latency, rel=0.2), kind
    for by_type in fit.drag.values():
        assert by_type == pytest.approx(dict.fromkeys(("CPU@0.8", "CPU@0.4", "CPU@0.3"), 2e-10))
    model = Calibration(name="links", types={}, links=fit, held_out_error={})
    for channel in channels(cluster):
        cost, ideal = model.channel_seconds(cluster, channel), alpha_beta(cluster, channel, rates)
        per_byte = factors[channel.kind][1]
        assert cost.seconds_per_byte == pytest.approx(per_byte * ideal.seconds_per_byte, rel=2e-2)
        assert set(cost.held) == set(ideal.held)


def test_a_collective_waits_longer_while_its_members_compute() -> None:
    cluster = load_testbed("skew_both")
    rows = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    ring = next(each for each in rows if each.kind == "all_reduce_ring")
    busy = replace(ring, seconds=0.04, while_computing=True)
    fit = fit_links([*rows, busy], cluster)
    assert fit.rates == fit_links(rows, cluster).rates
    assert fit.factors == fit_links(rows, cluster).factors
    model = Calibration(name="links", types={}, links=fit, held_out_error={})
    for channel in channels(cluster):
        cost = model.channel_seconds(cluster, channel)
        is_ring = channel.kind == ChannelKind.ALL_REDUCE_RING
        assert cost.loaded_latency_s == pytest.approx(0.04 if is_ring else cost.latency_s)


def test_an_operation_takes_time_from_its_members_by_their_type_and_number() -> None:
    cluster = load_testbed("skew_both")
    rows = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    ring = next(each for each in rows if each.kind == "all_reduce_ring" and len(each.devices) == 3)
    busy = replace(ring, device_seconds=(2e-3, 4e-3, 6e-3), while_computing=True)
    fit = fit_links([*rows, busy], cluster)
    assert fit.drag == fit_links(rows, cluster).drag
    model = Calibration(name="links", types={}, links=fit, held_out_error={})
    table = ChannelTable(cluster)
    pair = table[table.all_reduce((0, 1), hierarchical=False)]
    types = [device.type.name for device in cluster.devices]
    cost = model.channel_seconds(cluster, pair)
    assert cost.overhead_s == pytest.approx(dict(zip(types, (1e-3, 2e-3, 3e-3), strict=True)))
    send = table[1]
    assert model.channel_seconds(cluster, send).overhead_s == {}


def test_a_hierarchical_all_reduce_costs_what_the_measured_one_costs() -> None:
    """The library has one all-reduce; unmeasured, it looked twenty times as fast."""
    cluster = load_testbed("skew_both")
    rows = transferred(
        cluster, slowed(cluster, a=1, b=1, c=1), {ChannelKind.ALL_REDUCE_RING: (40.0, 1.2)}
    )
    model = Calibration(name="links", types={}, links=fit_links(rows, cluster), held_out_error={})
    table = ChannelTable(cluster)
    ring = table[table.all_reduce((0, 1, 2), hierarchical=False)]
    hierarchical = table[table.all_reduce((0, 1, 2), hierarchical=True)]
    cost, like = model.channel_seconds(cluster, hierarchical), model.channel_seconds(cluster, ring)
    factor = like.latency_s / ring.latency_s
    assert cost.latency_s == pytest.approx(factor * hierarchical.latency_s)
    assert cost.drag == like.drag


def test_a_ring_of_many_has_a_factor_of_its_own() -> None:
    cluster = load_testbed("skew_both")
    rates = slowed(cluster, a=1, b=1, c=1)
    table, sets = ChannelTable(cluster), [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    rings = [table[table.all_reduce(devices, hierarchical=False)] for devices in sets]
    costs = [alpha_beta(cluster, ring, rates) for ring in rings]
    whole = next(row for row in transferred(cluster, rates) if row.kind == "all_reduce_ring")
    rows = [
        replace(
            whole,
            devices=tuple(cluster.devices[device].name for device in ring.devices),
            num_bytes=payload,
            seconds=cost.latency_s + factor * payload * cost.seconds_per_byte,
            device_seconds=(0.0,) * len(ring.devices),
        )
        for ring, cost, factor in zip(rings, costs, (1.0, 1.0, 1.0, 1.2), strict=True)
        for payload in PAYLOADS
    ]
    fit = fit_links([*transferred(cluster, rates, {rings[0].kind: (1.0, 1.2)}), *rows], cluster)
    for among_many, factor in ((fit.among_many, 1.2), ({}, 1.0)):
        links = replace(fit, among_many=among_many)
        model = Calibration(name="links", types={}, links=links, held_out_error={})
        found = [model.channel_seconds(cluster, ring).seconds_per_byte for ring in rings]
        expected = [cost.seconds_per_byte for cost in costs]
        assert found[:3] == pytest.approx(expected[:3], rel=1e-2)
        assert found[3] == pytest.approx(factor * expected[3], rel=1e-2)


def test_one_measurement_gone_wrong_changes_no_factor() -> None:
    cluster = load_testbed("skew_both")
    rows = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    wrong = next(i for i, row in enumerate(rows) if row.kind == "point_to_point")
    rows[wrong] = replace(rows[wrong], seconds=1e-9)
    fit, exact = fit_links(rows, cluster), fit_links(rows[:wrong] + rows[wrong + 1 :], cluster)
    for kind, factors in exact.factors.items():
        assert fit.factors[kind] == pytest.approx(factors, rel=0.1)


def test_link_error_is_that_of_a_payload_which_was_not_seen() -> None:
    cluster = load_testbed("skew_both")
    exact = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    errors = link_error(exact, cluster)
    assert set(errors) == {"point_to_point", *(kind.name.lower() for kind in KINDS)}
    assert max(errors.values()) < 0.02
    twice = [
        replace(each, seconds=2 * each.seconds) if each.num_bytes == PAYLOADS[-2] else each
        for each in exact
    ]
    assert all(
        error == pytest.approx(0.5, abs=0.02) for error in link_error(twice, cluster).values()
    )
    few = [each for each in exact if each.num_bytes in PAYLOADS[:2]]
    assert link_error(few, cluster) == {}


def test_links_of_another_cluster_are_refused() -> None:
    cluster = load_testbed("skew_both")
    rows = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    with pytest.raises(ClusterError, match="has no device 'a'"):
        fit_links(rows, cluster_of((1.0, ["T4"]), (1.0, ["T4"])))


# --- files --------------------------------------------------------------------------------------


def complete() -> tuple[Calibration, OpGraph, Cluster]:
    graph, cluster = linear_chain(), load_testbed("skew_both")
    links = transferred(cluster, slowed(cluster, a=1, b=0.8, c=0.9), cpu_s_per_byte=1e-10)
    found = replace(measured(graph), links=tuple(links))
    return calibrate(found, cluster, name="round"), graph, cluster


def test_a_calibration_predicts_the_same_after_saving(tmp_path: Path) -> None:
    model, graph, cluster = complete()
    model.save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json")
    assert loaded.name == "round"
    new = linear_chain(width=512)
    for each in (graph, new):
        for samples in (1, 3, 8):
            assert (
                loaded.op_seconds(each, T4, samples) == model.op_seconds(each, T4, samples)
            ).all()
    assert loaded.copy_seconds(T4) == model.copy_seconds(T4)
    for channel in channels(cluster):
        assert loaded.channel_seconds(cluster, channel) == model.channel_seconds(cluster, channel)
    of_ops, of_models = loaded.held_out_error["T4"]
    assert of_ops == model.held_out_error["T4"][0]
    assert of_models is None, "there was one model only"


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (
        lambda record: record.update(schema_version=99),
        "schema_version 99; this heterog reads 1",
    ),
    "no types": (lambda record: record.pop("types"), "'types'"),
    "no curve": (
        lambda record: record["types"]["T4"].pop("curves"),
        "'types.T4.curves' is missing",
    ),
    "unknown": (lambda record: record["types"]["T4"]["any_kind"].update(slope=[1]), "slope"),
    "no links": (lambda record: record.update(links=None), "field 'links' should be a valid dict"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_calibrations_are_refused(tmp_path: Path, case: str) -> None:
    damage, text = DAMAGES[case]
    path = tmp_path / "calibration.json"
    complete()[0].save(path)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(InputFileError, match=text) as caught:
        Calibration.load(path)
    assert "calibration.json" in str(caught.value)


def test_files_that_are_no_calibration_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    complete()[0].save(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(InputFileError, match="not valid JSON"):
        Calibration.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(InputFileError, match="not a JSON object"):
        Calibration.load(path)
    with pytest.raises(InputFileError, match=r"absent\.json"):
        Calibration.load(tmp_path / "absent.json")


def test_measurements_survive_their_file(tmp_path: Path) -> None:
    cluster = load_testbed("skew_both")
    rows = transferred(cluster, slowed(cluster, a=1, b=1, c=1))
    found = replace(measured(linear_chain()), links=tuple(rows), cluster=cluster.to_dict())
    path = tmp_path / "measurements.json"
    found.save(path)
    assert Measurements.load(path) == found
    record = json.loads(path.read_text())
    del record["ops"][0]["seconds"]
    path.write_text(json.dumps(record))
    with pytest.raises(InputFileError, match="seconds"):
        Measurements.load(path)


def test_merging_keeps_all_rows_and_refuses_two_clusters() -> None:
    first, second = measured(linear_chain()), measured(linear_chain(width=512))
    both = load_testbed("skew_both").to_dict()
    merged = merge([first, replace(second, cluster=both), replace(first, cluster=both)])
    assert merged.ops == first.ops + second.ops + first.ops
    assert merged.cluster == both
    other = load_testbed("skew_network").to_dict()
    with pytest.raises(ClusterError, match=r"different clusters .* make a calibration of each"):
        merge([replace(first, cluster=both), replace(second, cluster=other)])


def test_compiled_steps_have_a_calibration_of_their_own() -> None:
    graph, cluster = linear_chain(), cluster_of((1.0, ["T4", "T4"]))
    eager, compiled = measured(graph), replace(measured(graph), compiled=True)
    with pytest.raises(InputFileError, match=r"of compiled steps, others are not"):
        merge([eager, compiled])
    links = replace(eager, ops=(), cluster=cluster.to_dict())
    assert merge([links, compiled]).compiled
    chosen = strategy(graph, cluster, (6, 2))
    for model, right in ((calibrate(eager), "eager"), (calibrate(compiled), "compiled")):
        for execution in Execution:
            like = replace(cluster, execution=execution)
            share = sum(extrapolated_by(model, graph, like, chosen).values())
            is_known = execution.compiles == (right == "compiled")
            assert share == pytest.approx(0.0 if is_known else 1.0)
