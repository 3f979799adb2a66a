"""Graphs that other tools or people write: what the format says must do, and what it doubts."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.errors import HeterogWarning, InputFileError
from heterog.graph import serialize
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import P, R
from heterog.graph.serialize import graph_from_dict, graph_to_dict, load_graph, save_graph
from heterog.pricing.roofline import Roofline
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.search.asking import make_plan
from tests.thorough import one_in


def documented() -> dict[str, Any]:
    """The example of the format's documentation."""
    lines = (serialize.__doc__ or "").splitlines()
    begin = lines.index("    {")
    end = lines.index("    }", begin)
    record: dict[str, Any] = json.loads("\n".join(lines[begin : end + 1]))
    return record


def one_op() -> dict[str, Any]:
    """A step that trains nothing."""
    return {
        "schema_version": 1,
        "name": "one op",
        "batch_size": 8,
        "loss": "y",
        "optimizer": "SGD",
        "optimizer_state_ratio": 0.0,
        "tensors": [
            {"name": "x", "shape": [8, 4], "dtype": "float32", "kind": "batch"},
            {"name": "y", "shape": [8], "dtype": "float32"},
        ],
        "ops": [{"kind": "f", "inputs": ["x"], "outputs": ["y"], "batch_dims": [0], "flops": 1e6}],
    }


def chain(num_layers: int = 3, *, modules: bool = False, tied: bool = False) -> dict[str, Any]:
    """Layers of which each multiplies by its weight; the first one's, if they are tied."""
    tensors = [{"name": "x0", "shape": [16, 32], "dtype": "float32", "kind": "batch"}]
    ops: list[dict[str, Any]] = []
    for layer in range(num_layers):
        weight = "w0" if tied else f"w{layer}"
        if layer == 0 or not tied:
            tensors.append(
                {"name": weight, "shape": [32, 32], "dtype": "float32", "kind": "parameter"}
            )
        tensors.append({"name": f"x{layer + 1}", "shape": [16, 32], "dtype": "float32"})
        ops.append(
            {
                "kind": "layer",
                "inputs": [f"x{layer}", weight],
                "outputs": [f"x{layer + 1}"],
                "batch_dims": [0],
                "flops": 1e9,
                "module": f"layer{layer}" if modules else "",
            }
        )
    parts = []
    for layer in reversed(range(num_layers)):
        tensors.append(
            {"name": f"dw{layer}", "shape": [32, 32], "dtype": "float32", "kind": "gradient"}
        )
        ops.append(
            {
                "kind": "layer_gradient",
                "inputs": [f"x{layer}", f"x{num_layers}"],
                "outputs": [f"dw{layer}"],
                "phase": "backward",
                "rule": {"inputs": ["S(0)", "S(0)"], "outputs": ["P"]},
                "flops": 1e9,
                "module": f"layer{layer}" if modules else "",
            }
        )
        parts.append(f"dw{layer}")
    if tied:
        tensors.append({"name": "dw", "shape": [32, 32], "dtype": "float32", "kind": "gradient"})
        ops.append(
            {
                "kind": "add",
                "inputs": parts,
                "outputs": ["dw"],
                "phase": "backward",
                "rule": {"inputs": ["P"] * num_layers, "outputs": ["P"]},
            }
        )
        ops.append({"kind": "update", "inputs": ["w0", "dw"]})
    else:
        ops += [{"kind": "update", "inputs": [f"w{n}", f"dw{n}"]} for n in range(num_layers)]
    return {
        "schema_version": 1,
        "name": "chain",
        "batch_size": 16,
        "loss": f"x{num_layers}",
        "optimizer": "Adam",
        "optimizer_state_ratio": 2.0,
        "tensors": tensors,
        "ops": ops,
    }


def without_batch() -> dict[str, Any]:
    """Nothing is split: every op runs whole."""
    record = chain()
    for op in record["ops"]:
        op.pop("batch_dims", None)
        op.pop("rule", None)
    record["tensors"][0]["placement"] = "R"
    return record


def with_control_edge() -> dict[str, Any]:
    """Layer 1 waits for a tensor of no bytes that layer 0 makes."""
    record = chain(2, modules=True)
    record["tensors"].append({"name": "go", "shape": [0], "dtype": "bool"})
    first, second = record["ops"][:2]
    for op in (first, second):
        del op["batch_dims"]
    first["outputs"].append("go")
    first["rule"] = {"inputs": ["S(0)", "R"], "outputs": ["S(0)", "R"]}
    second["inputs"] = ["x0", "w1", "go"]  # nothing else of layer 0
    second["rule"] = {"inputs": ["S(0)", "R", "R"], "outputs": ["S(0)"]}
    return record


SHAPES: dict[str, Callable[[], dict[str, Any]]] = {
    "as documented": documented,
    "one op": one_op,
    "chain": chain,
    "with modules": lambda: chain(modules=True),
    "one layer": lambda: chain(1),
    "tied": lambda: chain(tied=True),
    "without batch": without_batch,
    "control edge": with_control_edge,
}
METHODS = [planner.name for planner in default_methods()]


@one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_plans_graphs_written_by_hand(shape: str, tmp_path: Path) -> None:
    """The documented example crashed the default methods: it has one group and no slot."""
    graph = graph_from_dict(SHAPES[shape](), "test")
    cluster = Cluster.load("paper_8gpu")
    plan = make_plan(graph, cluster, methods=METHODS, known=default_methods(), budget="20e")
    assert {row.method for row in plan.rows} >= set(METHODS)
    assert plan.outcome == "ok"
    assert plan.step_time_s
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").strategy == plan.strategy


def seconds(record: dict[str, Any], samples: int) -> list[float]:
    graph = graph_from_dict(record, "test")
    kind = Cluster.load("paper_8gpu").devices[0].type
    return [float(each) for each in Roofline().op_seconds(graph, kind, samples)]


def test_measured_curves_are_interpolated(tmp_path: Path) -> None:
    record = documented()
    record["ops"][0]["measured_s"] = {"V100-16GB": [[0.125, 2e-6], [0.5, 5e-6], [1, 8e-6]]}
    assert seconds(record, 32)[0] == 8e-6
    assert seconds(record, 4)[0] == 2e-6
    assert seconds(record, 24)[0] == pytest.approx(6.5e-6)  # half way between two points
    assert seconds(record, 2)[0] == pytest.approx(1.5e-6)  # 1 us + 8 us x share
    graph = graph_from_dict(record, "test")
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").ops == graph.ops
    # An op that does not follow the share takes what the whole batch takes, whatever the share.
    record["ops"][0] |= {"rule": {"inputs": ["R", "R"], "outputs": ["R"]}, "batch_dims": None}
    record["ops"][1]["rule"]["inputs"] = ["S(0)", "R"]
    record["ops"][0] = {k: v for k, v in record["ops"][0].items() if v is not None}
    assert seconds(record, 4)[0] == 8e-6


@pytest.mark.parametrize(
    ("curve", "problem"),
    [
        ([[0.5, 1e-6]], "has the shares [0.5]; they must rise and end with 1"),
        ([[1, 1e-6], [0.5, 1e-6]], "must rise and end with 1"),
        ([[0.5, 1e-6], [0.5, 2e-6], [1, 3e-6]], "must rise and end with 1"),
        ([[0, 1e-6], [1, 2e-6]], "greater than 0"),
        ([[1, -1e-6]], "greater than or equal to 0"),
        ([], "at least 1 item"),
    ],
)
def test_curves_that_make_no_sense(curve: list[list[float]], problem: str) -> None:
    record = documented()
    record["ops"][0]["measured_s"] = {"V100-16GB": curve}
    with pytest.raises(InputFileError) as caught:
        graph_from_dict(record, "test")
    assert problem in str(caught.value)


def with_identity(op: dict[str, Any]) -> dict[str, Any]:
    """The weight's gradient passes through one more op before the update."""
    record = documented()
    record["tensors"].append(
        {"name": "dw2", "shape": [64, 10], "dtype": "float32", "kind": "gradient"}
    )
    record["ops"].insert(
        2, {"kind": "Identity", "inputs": ["dw"], "outputs": ["dw2"], "phase": "backward"} | op
    )
    record["ops"][3]["inputs"] = ["w", "dw2"]
    return record


def gradient_placement(record: dict[str, Any]) -> tuple[object, object]:
    """What the identity needs, and how it leaves the gradient."""
    graph = graph_from_dict(record, "test")
    plan = batch_plan(graph)
    index = next(i for i, op in enumerate(graph.ops) if op.inputs == (graph.updates[0][2] - 1,))
    return plan.needed[index][0], plan.placements[graph.updates[0][2]]


def test_a_gradient_that_is_passed_on_whole_is_doubted() -> None:
    with pytest.warns(HeterogWarning) as told:
        found = gradient_placement(with_identity({"batch_dims": [None]}))
    assert found == (R, R)
    text = str(told[0].message)
    assert "op 2 'Identity' reads tensor 3 'dw', a partial sum over the batch, whole" in text
    assert 'write "rule": {"inputs": ["P"], "outputs": ["P"]} instead of batch_dims' in text


@pytest.mark.parametrize(
    "op",
    [
        {"rule": {"inputs": ["P"], "outputs": ["P"]}},
        {"kind": "alias.default", "args": {"self": {"t": 0}}},
    ],
    ids=["rule", "view"],
)
def test_a_gradient_that_is_passed_on_as_advised_needs_no_all_reduce(op: dict[str, Any]) -> None:
    assert gradient_placement(with_identity(op)) == (P, P)


def with_shape_vector(op: dict[str, Any]) -> dict[str, Any]:
    record = documented()
    record["tensors"].append({"name": "s", "shape": [2], "dtype": "int32"})
    record["ops"].append({"kind": "Shape", "inputs": ["x"], "outputs": ["s"]} | op)
    return record


def test_a_shape_that_would_be_summed_over_the_batch_is_doubted() -> None:
    with pytest.warns(HeterogWarning, match="is a shape or an index, write a .rule. with the out"):
        graph_from_dict(with_shape_vector({"batch_dims": [None]}), "test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = {"inputs": ["S(0)"], "outputs": ["R"]}
        graph = graph_from_dict(with_shape_vector({"rule": rule}), "test")
    (shape,) = (t for t, meta in enumerate(graph.tensors) if meta.name == "s")
    assert batch_plan(graph).placements[shape] == R


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (["P", "S(0)"], "reads tensor 'x' as P, but it is S(0,1) (split along the batch)"),
        (["S(0)", "L"], "reads tensor 'y' as L, but it is S(0,1) (split along the batch)"),
    ],
)
def test_rules_that_contradict_what_they_read(inputs: list[str], problem: str) -> None:
    record = documented()
    record["ops"][1]["rule"]["inputs"] = inputs
    with pytest.raises(InputFileError) as caught:
        graph_from_dict(record, "test")
    assert f"op 'my_layer_gradient' {problem}; write a rule that reads it as" in str(caught.value)


def test_local_statistics_stay_local() -> None:
    record = documented()
    record["ops"][0] |= {"rule": {"inputs": ["S(0)", "R"], "outputs": ["L"]}}
    del record["ops"][0]["batch_dims"]
    with pytest.raises(InputFileError, match=r"as S.*but it is L"):
        graph_from_dict(record, "test")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r["tensors"][3].update(shape=[10, 64]), "with a gradient of shape [10, 64]"),
        (lambda r: r["ops"].append(r["ops"][2]), "'w' is updated by op 2 'update' and again by"),
        (lambda r: r.update(loss="x"), "the loss is tensor 0 'x', which no op of the forward"),
        (
            lambda r: r["tensors"][1].update(placement="S(0)", shape=[32, 10]),
            "is a parameter, which has no batch dimension",
        ),
        (lambda r: r["tensors"][0].update(placement="P"), "inputs are R or S(dim)"),
        (lambda r: r["tensors"][0].update(shape=[32, 2**31 - 1, 2**20]), "more than 16384.0 GiB"),
        (lambda r: r.update(batch_size=2**21), "less than or equal to 1048576"),
        (lambda r: r.update(name='x"""; import os'), "which names cannot have"),
        (lambda r: r.update(optimizer="SGD(); x"), "is not the name of a class"),
        (lambda r: r["ops"][0].update(module="a\nb"), "is not printable"),
        (
            lambda r: r["ops"][0].update(kind="view.default", inputs=[], batch_dims=[None]),
            "is a view, but reads no tensor",
        ),
        (
            lambda r: (
                r["tensors"].append({"name": "w2", "shape": [64, 10], "dtype": "float32"}),
                r["ops"][2].update(outputs=["w2"]),
                r["ops"].append({"kind": "f", "inputs": ["w2"], "outputs": []}),
            ),
            "reads tensor 4 'w2', which an update makes",
        ),
    ],
)
def test_graphs_that_make_no_sense(change: Callable[[Any], object], problem: str) -> None:
    record = copy.deepcopy(documented())
    change(record)
    with pytest.raises(InputFileError) as caught:
        graph_from_dict(record, "test")
    assert problem in str(caught.value)


def test_a_control_edge_orders_ops_on_different_devices() -> None:
    """B reads nothing of A but the token, and begins when A has ended and a message has come."""
    graph: OpGraph = graph_from_dict(with_control_edge(), "test")
    cluster = Cluster.load("paper_8gpu")
    placed = [Decision(devices=(device,), shares=(graph.batch_size,)) for device in (0, 2)]
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=tuple(placed),
        homes=(REPLICATED,) * 2,
    )
    strategy.check(graph, cluster)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(strategy)
    program, start, finish = evaluator.timings(choice, Order.FIFO)
    first, second = (
        next(
            task
            for task in range(program.num_tasks)
            if program.kind[task] == 0 and program.subject[task] == op
        )
        for op in (0, 1)
    )
    assert start[second] >= finish[first] + cluster.latency_s(0, 2)


@pytest.mark.parametrize("in_file", ["by hand", "saved"])
@pytest.mark.parametrize(
    ("names", "args", "text"),
    [
        (["x", "x"], {"self": {"t": 0}, "mat2": {"t": 1}}, "op 0 'mm.default'"),
        (["x"], {"self": {"t": 0}, "mat2": {"t": 0}}, "op 0 'mm.default'"),
    ],
)
def test_an_op_with_other_outputs_than_its_kind_is_refused(
    names: list[str], args: dict[str, Any], text: str, in_file: str
) -> None:
    """All tensors after it had the placement of another one: an IndexError, or a wrong plan."""
    square = {"shape": [8, 8], "dtype": "float32"}
    reader = {"kind": "f", "inputs": ["z"], "outputs": ["u"]}
    how = (
        {"batch_dims": [0]}
        if in_file == "by hand"
        else {"rule": {"inputs": ["R"], "outputs": ["R"]}}
    )
    record = one_op() | {
        "loss": "u",
        "tensors": [
            {"name": "x", "kind": "batch"} | square,
            *({"name": name} | square for name in "yzu"),
        ],
        "ops": [
            {"kind": "mm.default", "inputs": names, "outputs": ["y", "z"], "args": args},
            reader | how,
        ],
    }
    with pytest.raises(InputFileError, match=text):
        graph_from_dict(record, "file")


def test_the_dtype_of_masters_is_kept_and_must_hold_fractions() -> None:
    graph = graph_from_dict(documented() | {"master_dtype": "float64"}, "file")
    assert graph_from_dict(graph_to_dict(graph), "file").master_dtype == "float64"
    assert [graph.stepped_dtype(each) for each in graph.parameters] == ["float64"]
    assert "master_dtype" not in graph_to_dict(graph_from_dict(documented(), "file"))
    for wrong in ("int64", "float", "float31"):
        with pytest.raises(InputFileError, match=f"master_dtype '{wrong}' is no type of floating"):
            graph_from_dict(documented() | {"master_dtype": wrong}, "file")
