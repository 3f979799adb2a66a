import copy
import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heterog.cluster import Cluster
from heterog.errors import HeterogError, InputFileError
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import Arg, L, P, R, S, TensorRef
from heterog.graph.serialize import graph_from_dict, graph_to_dict, load_graph, save_graph
from heterog.graph.workload import Workload
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.graph.test_imported_graphs import documented
from tests.thorough import cases

COLUMNS = (
    "name",
    "source",
    "batch_size",
    "tensors",
    "ops",
    "batch_placements",
    "optimizer",
    "optimizer_state_ratio",
    "loss",
    "master_dtype",
    "fingerprint",
)


def assert_equal(graph: OpGraph, other: OpGraph) -> None:
    for column in COLUMNS:
        assert getattr(graph, column) == getattr(other, column), column


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_captured_graph_comes_back_equal(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    batch = (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    graph = capture(Workload(model, batch, nn.functional.cross_entropy, torch.optim.Adam))
    path = tmp_path / name
    save_graph(graph, path)
    loaded = load_graph(path)
    assert_equal(graph, loaded)
    assert batch_plan(loaded).placements == batch_plan(graph).placements
    is_gzip = path.read_bytes()[:2] == b"\x1f\x8b"
    assert is_gzip == name.endswith(".gz")


ARGS: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
SHAPES = st.lists(st.sampled_from([1, 4, 8]), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "int64", "bool"])
AMOUNTS = st.floats(0.0, 1e18)
LETTERS = st.characters(categories=["L", "N"])
WORDS = st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=4)
NAMES = st.text(LETTERS, min_size=1, max_size=4)
SECONDS = st.floats(0.0, 1e9)
MEASURED = SECONDS | SECONDS.map(lambda s: ((0.25, s), (1.0, 2.0 * s)) if s < 1e8 else s)


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    input_kinds = [
        TensorKind.PARAMETER,
        TensorKind.BUFFER,
        TensorKind.BATCH,
        TensorKind.CONSTANT,
    ]
    tensors = [
        GraphTensor(
            shape=draw(SHAPES),
            dtype=draw(DTYPES),
            kind=draw(st.sampled_from(input_kinds)),
            name=draw(WORDS),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    placements = tuple(
        S(0)
        if t.shape[:1] in ((4,), (8,)) and t.kind != TensorKind.PARAMETER and draw(st.booleans())
        else R
        for t in tensors
    )
    places = list(placements)
    ops = []
    for _ in range(draw(st.integers(1, 4))):
        inputs = tuple(draw(st.lists(st.integers(0, len(tensors) - 1), max_size=3)))
        num_outputs = draw(st.integers(1, 2))
        args: dict[str, Arg] = {f"t{i}": TensorRef(i) for i in range(len(inputs))}
        args |= draw(st.dictionaries(WORDS, ARGS, max_size=2))
        rule = None
        # Local statistics are read by rules only, and as such; anything else may be read whole.
        made = R
        if draw(st.booleans()) or any(places[each] == L for each in inputs):
            made = draw(st.sampled_from([R, P, L]))
            rule = (tuple(L if places[each] == L else R for each in inputs), (made,) * num_outputs)
        places += [made] * num_outputs
        ops.append(
            GraphOp(
                kind=draw(st.sampled_from(["mine", "other"])),
                args=args,
                inputs=inputs,
                num_outputs=num_outputs,
                phase=draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD])),
                module=draw(WORDS),
                flops=draw(AMOUNTS),
                bytes_read=draw(AMOUNTS),
                bytes_written=draw(AMOUNTS),
                rule=rule,
                measured_s=tuple(draw(st.dictionaries(NAMES, MEASURED, max_size=2)).items()),
                name=draw(WORDS),
            )
        )
        tensors += [
            GraphTensor(shape=draw(SHAPES), dtype=draw(DTYPES)) for _ in range(num_outputs)
        ]
    return OpGraph(
        name=draw(NAMES),
        source=draw(WORDS),
        batch_size=4,
        tensors=tuple(tensors),
        ops=tuple(ops),
        batch_placements=placements,
        optimizer="Adam",
        optimizer_state_ratio=draw(st.floats(0.0, 1e3)),
        loss=draw(st.integers(len(placements), len(tensors) - 1)),
    )


@given(graphs())
def test_any_graph_comes_back_equal(graph: OpGraph) -> None:
    # allow_nan=False: what is written is JSON for every reader, not only for Python.
    text = json.dumps(graph_to_dict(graph), allow_nan=False)
    assert_equal(graph, graph_from_dict(json.loads(text), "test"))


def load(tmp_path: Path, record: object) -> OpGraph:
    path = tmp_path / "foreign.json"
    path.write_text(json.dumps(record))
    return load_graph(path)


def test_foreign_graph_of_the_docstring_runs_on_a_cluster(tmp_path: Path) -> None:
    graph = load(tmp_path, documented())
    assert batch_plan(graph).placements == (S(0), R, S(0), P, R)
    assert group_ops(graph).num_groups == 1
    # Bytes follow from the sizes: x 8192, w 2560, y 1280; the update reads w and dw, writes w.
    layer, gradient, update = graph.ops
    assert (layer.bytes_read, layer.bytes_written) == (8192 + 2560, 1280)
    assert (gradient.bytes_read, gradient.bytes_written) == (8192 + 1280, 2560)
    assert (update.bytes_read, update.bytes_written) == (2 * 2560, 2560)
    assert update.phase == Phase.UPDATE

    cluster = Cluster.load("paper_8gpu")
    evaluator = Evaluator(graph, cluster)
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(Decision(devices=(0, 1), shares=(16, 16)),),
        homes=(REPLICATED,),
    )
    evaluation = evaluator.evaluate(strategy)
    assert evaluation.is_ok
    # Half of the measured time on each V100, then gradient, all-reduce, update.
    program, start, finish = evaluator.timings(evaluator.encode(strategy), evaluation.order)
    assert program.num_tasks == 7
    assert finish[0] - start[0] == pytest.approx(0.75e-5)


def test_batch_dims_follow_upstream_ops() -> None:
    record = documented()
    record["ops"][1] = {
        "kind": "my_layer_gradient",
        "inputs": ["x", "y"],
        "outputs": ["dw"],
        "batch_dims": [None],
    }
    gradient = graph_from_dict(record, "test").ops[1]
    assert gradient.rule == ((S(0), S(0)), (P,))


def test_batch_dims_after_an_op_with_a_built_in_rule() -> None:
    record = documented()
    record["ops"][0] = {
        "kind": "mm.default",
        "inputs": ["x", "w"],
        "outputs": ["y"],
        "args": {"self": {"t": 0}, "mat2": {"t": 1}},
    }
    record["ops"][1] |= {"batch_dims": [None], "rule": None}
    graph = graph_from_dict(record, "test")
    assert graph.ops[0].rule is None
    assert graph.ops[1].rule == ((S(0), S(0)), (P,))


def test_whole_inputs_give_whole_outputs() -> None:
    record = documented()
    record["ops"][0] |= {"inputs": ["w"], "batch_dims": [None]}
    assert graph_from_dict(record, "test").ops[0].rule == ((R,), (R,))


def test_ops_out_of_order_are_reordered() -> None:
    record = documented()
    expected = graph_from_dict(record, "test")
    record["ops"].reverse()
    assert_equal(expected, graph_from_dict(record, "test"))


def test_placements_of_step_inputs() -> None:
    record = documented()
    record["tensors"][0] |= {"shape": [64, 96], "placement": "S(1,3)"}
    record["tensors"][1] |= {"shape": [64, 10]}
    record["ops"][0]["rule"] = {"inputs": ["R", "R"], "outputs": ["R"]}
    record["ops"][1]["rule"]["inputs"][0] = "R"
    assert graph_from_dict(record, "test").batch_placements[0] == S(1, 3)
    record["tensors"][0] |= {"placement": None, "batch_dim": 1}
    assert graph_from_dict(record, "test").batch_placements[0] == S(1)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r.update(schema_version=2), "has schema_version 2; this heterog reads 1"),
        (lambda r: r.pop("schema_version"), "has schema_version None"),
        (lambda r: r.pop("batch_size"), "field 'batch_size' is missing"),
        (lambda r: r["ops"][1].pop("inputs"), "field 'ops.1.inputs' is missing"),
        (lambda r: r["ops"][1].pop("outputs"), "field 'ops.1.outputs' is missing"),
        (lambda r: r["ops"][0].update(flop=1), "unknown field 'ops.0.flop'"),
        (
            lambda r: r["ops"][0].update(flops="many"),
            "field 'ops.0.flops' should be a valid number, got 'many'",
        ),
        (
            lambda r: r["ops"][0].update(phase="sideways"),
            "'ops.0.phase' should be 'forward', 'backward' or 'update', got 'sideways'",
        ),
        (lambda r: r["ops"][0].update(measured_s={"V100": -1.0}), "greater than or equal to 0"),
        (lambda r: r["tensors"][0].update(dtype="int7"), "unknown dtype 'int7'; known: float64"),
        (
            lambda r: r["ops"][0].update(inputs=["x", "v"]),
            "op 0 'my_layer' reads tensor 'v', but no tensor has that name",
        ),
        (
            lambda r: r["ops"][0].update(inputs=[0, 9]),
            "op 0 'my_layer' reads tensor 9, but there are only 4",
        ),
        (
            lambda r: r["tensors"][1].update(name="x"),
            "reads tensor 'x', but several tensors have that name",
        ),
        (lambda r: r["ops"][0].update(inputs=["x", "dw"]), "the graph has a cycle through op"),
        (
            lambda r: r["ops"][0].update(outputs=["y", "dw"], batch_dims=[0, None]),
            "'dw' is made by op 0 'my_layer' and again by op 1 'my_layer_gradient'",
        ),
        (
            lambda r: r["ops"].pop(0),
            "tensor 2 'y' of kind activation is made by no op",
        ),
        (
            lambda r: r["tensors"][2].update(placement="S(0)"),
            "tensor 2 'y' is made by an op, so its placement follows from there",
        ),
        (
            lambda r: r["tensors"][1].update(batch_dim=1),
            "placement S(1) does not fit tensor 1 'w' of shape [64, 10]: dimension 1 must be a "
            "multiple of 1 x 32",
        ),
        (
            lambda r: r["ops"][1]["rule"].update(outputs=["Q"]),
            "placement 'Q' of tensor 3 'dw' is none of R, P, L, S(dim) and S(dim,outer)",
        ),
        (
            lambda r: r["ops"][1]["rule"].update(inputs=["R"]),
            "the rule of op 1 'my_layer_gradient' has 1 placements for 2 inputs",
        ),
        (
            lambda r: r["ops"][0].update(batch_dims=[0, 0]),
            "op 0 'my_layer' has 2 batch_dims for 1 outputs",
        ),
        (
            lambda r: r["ops"][0].update(args={"a": {"t": 2}}),
            "op 0 'my_layer' has the argument {'t': 2}",
        ),
        (
            lambda r: r["ops"][0].update(kind="mm.default", batch_dims=None, inputs=["x"]),
            "op 0 'mm.default' has no args, which its built-in sharding rule reads",
        ),
        (
            lambda r: (
                r["ops"][0].update(kind="addmm.default", batch_dims=None, args={"a": {"t": 0}}),
                r["ops"][1].update(rule=None, batch_dims=[None]),
            ),
            "op 0 'addmm.default': the args do not fit the sharding rule of addmm",
        ),
        (
            lambda r: r["ops"][2].update(inputs=["dw", "w"]),
            "op 2 'update' must read a parameter and the gradient that an op makes",
        ),
        (lambda r: r["ops"][0].update(kind=3), "refers to entry 3 of 'kinds', which has 0"),
        (lambda r: r.update(loss="z"), "the loss is tensor 'z', but no tensor has that name"),
        (lambda r: r.update(batch_size=0), "field 'batch_size' should be greater than or"),
        (
            lambda r: r.update(tensors={"shape": [[1]], "dtype": []}),
            "columns of 'tensors' must be lists of one length; they have shape: 1, dtype: 0",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: Change, problem: str) -> None:
    record = documented()
    change(record)
    with pytest.raises(InputFileError) as error:
        load(tmp_path, record)
    text = str(error.value)
    assert problem in text
    assert text.startswith(f"graph file {tmp_path / 'foreign.json'}")
    assert "\n" not in text


def test_files_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "graph.json.gz"
    with pytest.raises(InputFileError, match=r"graph\.json\.gz: No such file"):
        load_graph(path)
    path.write_bytes(gzip.compress(b'{"schema_version": 1'))
    with pytest.raises(InputFileError, match=r"graph\.json\.gz is not valid JSON"):
        load_graph(path)
    path.write_text("[1, 2]")
    with pytest.raises(InputFileError, match=r"graph\.json\.gz holds \["):
        load_graph(path)


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    graph = graph_from_dict(documented(), "test")
    with pytest.raises(InputFileError, match="cannot write"):
        save_graph(graph, tmp_path / "missing" / "graph.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def captured_record() -> dict[str, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 5),
    )  # fmt: skip
    batch = (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    graph = capture(Workload(model, batch, nn.functional.cross_entropy, torch.optim.SGD))
    return graph_to_dict(graph)


def damaged_ops(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Graphs of which one op has an argument, a kind or inputs that do not fit."""
    for index, args in enumerate(record["ops"]["args"]):
        for change in (*(args or ()), "kind", "fewer inputs", "no inputs"):
            copied = copy.deepcopy(record)
            ops = copied["ops"]
            if change == "kind":
                ops["kind"][index] = (ops["kind"][index] + 1) % len(record["kinds"])
            elif change == "fewer inputs":
                ops["inputs"][index] = ops["inputs"][index][1:]
            elif change == "no inputs":
                ops["inputs"][index] = []
            else:
                ops["args"][index]["renamed"] = ops["args"][index].pop(change)
            yield copied


def test_an_op_that_does_not_fit_its_kind_is_one_line(captured_record: dict[str, Any]) -> None:
    """Field by field: it is refused in a line, or legal and can be simulated."""
    refused = 0
    cluster = Cluster.load("rtx_mixed")
    for record in islice(damaged_ops(captured_record), 0, None, 240 // cases(240, 30)):
        try:
            Evaluator(graph_from_dict(record, "graph file x.json"), cluster)
        except HeterogError as error:
            refused += "\n" not in str(error)
    assert refused > cases(100, 12)


def test_losses_of_labels_need_all_of_their_parts(captured_record: dict[str, Any]) -> None:
    kinds, of_op = captured_record["kinds"], captured_record["ops"]["kind"]
    loss = of_op.index(kinds.index("nll_loss_forward.default"))
    renamed, exchanged = copy.deepcopy(captured_record), copy.deepcopy(captured_record)
    args = renamed["ops"]["args"][loss]
    args["scores"] = args.pop("self")
    with pytest.raises(InputFileError, match=r"'nll_loss_forward' do not fit its kind \(KeyError"):
        graph_from_dict(renamed, "graph file x.json")
    exchanged["ops"]["kind"][of_op.index(kinds.index("t.default"))] = of_op[loss]
    with pytest.raises(InputFileError, match=r"do not fit"):
        graph_from_dict(exchanged, "graph file x.json")
