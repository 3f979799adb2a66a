"""Islands that train alone and average: real ranks against a slow loop in one process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.errors import StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering import lower
from heterog.modes.averaging.buckets import averaged_buckets
from heterog.modes.averaging.passes import passes_after, passes_before, times_moved
from heterog.modes.averaging.ranks import Averager, OuterState, changes_key, outer_step
from heterog.modes.averaging.value import AverageWeights, Averaging
from heterog.modes.codecs.value import CodecRule, Traffic, parse_codec, with_rules
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.measure.rehearsal import rehearse
from heterog.runtime.step.collectives import Communicator, Pending
from heterog.runtime.step.masters import Masters
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import batch_of, workload_of
from tests.runtime.codec_reference import meant
from tests.runtime.interrupted import save_settled
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of, plan_of, strategy_of
from tests.thorough import one_in

ISLANDS = ((0,), (1, 2))
SAMPLES = (3, 5)
STEPS = 4
DILOCO = Averaging(every=2, weights=AverageWeights.EQUAL, outer_rate=0.7, outer_momentum=0.9)


def averaged(
    name: str,
    averaging: Averaging,
    *,
    optimizer: str = "SGD",
    piped: bool = False,
    idle: bool = False,
) -> Strategy:
    """Island 0 is one device; island 1 two, as replicas or a pipeline, or one of them alone."""
    graph = graph_of(name, optimizer)
    count = group_ops(graph).num_groups
    if idle:
        alone = [Decision(devices=(0, 2), shares=SAMPLES, teams=((0,), (2,)))] * count
        return strategy_of(graph, alone).with_mode(averaging)
    decisions = [Decision(devices=(0, 1, 2), shares=(3, 4, 1), sync=Sync.RING, teams=ISLANDS)]
    decisions *= count
    if piped:
        for group in range(count):
            other = 1 if group < count // 2 else 2
            decisions[group] = Decision(devices=(0, other), shares=SAMPLES, teams=((0,), (other,)))
    return strategy_of(graph, decisions, bucket_bytes=300).with_mode(averaging)


def coded(strategy: Strategy, graph: OpGraph, codec: str) -> Strategy:
    """The strategy with a codec on everything that it averages."""
    devices = dict.fromkeys(each.devices for each in averaged_buckets(graph, strategy))
    rules = [
        CodecRule(traffic=Traffic.PARAMETER_CHANGES, devices=each[::-1], codec=parse_codec(codec))
        for each in devices
    ]
    return with_rules(strategy, tuple(rules))


def train_averaged(rank: int, name: str, optimizer: str, path: str) -> tuple[list[float], object]:
    step = deploy(workload_of(name, optimizer), load_plan(path))
    losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    step.settle()
    return losses, step.state_dict()


class Messages:
    """What islands send of their changes by a codec, and what their messages have left out.

    Args:
        graph: Graph of the step.
        strategy: Strategy, for the parameters that share messages.
        codec: The codec.
    """

    def __init__(self, graph: OpGraph, strategy: Strategy, codec: str) -> None:
        names = [graph.tensors[parameter].name for _, parameter, _ in graph.updates]
        buckets = averaged_buckets(graph, strategy)
        self.buckets = [[names[row] for row in bucket.rows] for bucket in buckets]
        self.codec = parse_codec(codec)
        self.left_out: dict[tuple[int, int], Tensor] = {}

    def mean_change(
        self,
        anchors: dict[str, Tensor],
        copies: Sequence[dict[str, Tensor]],
        weights: Sequence[float],
    ) -> dict[str, Tensor]:
        """What all understand of the islands' changes together."""
        found: dict[str, Tensor] = {}
        for number, names in enumerate(self.buckets):
            total = torch.zeros(sum(anchors[name].numel() for name in names))
            for island, (copy, weight) in enumerate(zip(copies, weights, strict=True)):
                changes = [weight * (anchors[name] - copy[name]).reshape(-1) for name in names]
                whole = torch.cat(changes) + self.left_out.get((number, island), 0.0)
                understood = meant(whole, self.codec)
                self.left_out[number, island] = whole - understood
                total += understood
            parts = torch.split(total, [anchors[name].numel() for name in names])
            found |= {
                name: part.view(anchors[name].shape)
                for name, part in zip(names, parts, strict=True)
            }
        return found


def reference(
    name: str, optimizer: str, averaging: Averaging, messages: Messages | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """One copy of the model for each island; averages are taken parameter by parameter."""
    workload = workload_of(name, optimizer)
    models = [workload.make_model() for _ in SAMPLES]
    steppers = [
        workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
        for model in models
    ]
    batch_size = sum(SAMPLES)
    weights = [count / batch_size for count in SAMPLES]
    if averaging.weights == AverageWeights.EQUAL:
        weights = [0.5, 0.5]
    outer = [value.detach().clone() for value in models[0].parameters()]
    sgd = torch.optim.SGD(
        outer,
        lr=averaging.outer_rate,
        momentum=averaging.outer_momentum,
        nesterov=averaging.outer_momentum > 0,
    )
    losses = []
    sent: list[list[Tensor]] = []
    for number in range(STEPS):
        batch = batch_of(name, number)
        begin, total = 0, 0.0
        for model, stepper, count in zip(models, steppers, SAMPLES, strict=True):
            per_sample = [each.shape[0] // batch_size for each in batch]  # a token is a row
            own = tuple(
                each[begin * rows : (begin + count) * rows]
                for each, rows in zip(batch, per_sample, strict=True)
            )
            begin += count
            # A masked mean is over the labels of the whole batch, of which islands have parts
            # that are not those of their samples.
            part = labels_of(own) / labels_of(batch)
            loss = workload.step_loss(model, own) * part * batch_size / count
            stepper.zero_grad()
            torch.autograd.backward(loss)
            stepper.step()
            total += float(loss.detach()) * count / batch_size
        losses.append(total)
        is_last = number + 1 == STEPS
        if (number + 1) % averaging.every == 0:
            sent = [[value.detach().clone() for value in each.parameters()] for each in models]
        if sent and ((number + 1) % averaging.every == averaging.delay or is_last):
            move(models, sent, outer, sgd, weights, messages)
            sent = []
        if is_last and averaging.delay:  # settled
            now = [[value.detach().clone() for value in each.parameters()] for each in models]
            move(models, now, outer, sgd, weights, messages)
    return losses, models[0].state_dict()


def labels_of(batch: tuple[Tensor, ...]) -> int:
    """Labels that count; samples where there are no masks."""
    labels = batch[-1]
    return labels.shape[0] if labels.is_floating_point() else int((labels != -100).sum())


def move(
    models: list[nn.Module],
    sent: list[list[Tensor]],
    outer: list[Tensor],
    sgd: torch.optim.Optimizer,
    weights: list[float],
    messages: Messages | None,
) -> None:
    """The outer optimizer steps; each island keeps what it has learned since it sent."""
    if messages is None:
        for anchor, copies in zip(outer, zip(*sent, strict=True), strict=True):
            mean = torch.stack([w * v for w, v in zip(weights, copies, strict=True)]).sum(0)
            anchor.grad = anchor - mean
    else:
        names = [name for name, _ in models[0].named_parameters()]
        changes = messages.mean_change(
            dict(zip(names, outer, strict=True)),
            [dict(zip(names, copy, strict=True)) for copy in sent],
            weights,
        )
        for name, anchor in zip(names, outer, strict=True):
            anchor.grad = changes[name]
    sgd.step()
    with torch.no_grad():
        for model, before in zip(models, sent, strict=True):
            for value, old, new in zip(model.parameters(), before, outer, strict=True):
                value.copy_(new + (value - old))


def compare(
    found: list[tuple[list[float], object]], wanted: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = wanted
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-5)
    state = found[0][1]
    assert isinstance(state, dict)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "optimizer", "averaging", "cut"),
    [
        ("mlp", "SGD", Averaging(every=2), {"idle": True}),
        ("mlp", "AdamW", DILOCO, {"piped": True}),
        ("residual", "SGD", Averaging(every=4, weights=AverageWeights.EQUAL), {"piped": True}),
        ("gpt", "SGD", replace(DILOCO, every=3, delay=1), {}),
    ],
)
def test_ranks_train_as_the_loop_does(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    optimizer: str,
    averaging: Averaging,
    cut: dict[str, bool],
) -> None:
    strategy = averaged(name, averaging, optimizer=optimizer, **cut)
    path = tmp_path / "plan.json"
    plan_of(graph_of(name, optimizer), strategy).save(path)
    assert load_plan(path).strategy == strategy
    compare(
        ranks.run(train_averaged, name, optimizer, str(path)),
        reference(name, optimizer, averaging),
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "optimizer", "averaging", "codec", "cut"),
    [
        ("mlp", "AdamW", Averaging(every=2), "top_k=4", {"piped": True}),
        ("residual", "SGD", replace(DILOCO, every=1), "int8", {}),
        ("gpt", "SGD", replace(DILOCO, every=3, delay=1), "fp16", {}),
        ("mlp", "SGD", Averaging(every=1, weights=AverageWeights.EQUAL), "top_k=20", {}),
    ],
)
def test_codecs_of_changes_are_those_of_the_loop(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    optimizer: str,
    averaging: Averaging,
    codec: str,
    cut: dict[str, bool],
) -> None:
    """Islands stay equal bit for bit, and what a message leaves out comes with the next one."""
    graph = graph_of(name, optimizer)
    strategy = coded(averaged(name, averaging, optimizer=optimizer, **cut), graph, codec)
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    assert load_plan(path).strategy == strategy
    found = ranks.run(train_averaged, name, optimizer, str(path))
    messages = Messages(graph, strategy, codec)
    wanted = reference(name, optimizer, averaging, messages)
    compare(found, wanted)
    assert any(float(left.abs().max()) > 0 for left in messages.left_out.values())
    exact = reference(name, optimizer, averaging)
    assert any(not torch.equal(exact[1][key], value) for key, value in wanted[1].items())


def interrupted(rank: int, path: str, folder: str, cut: int) -> tuple[str, object, object]:
    """Four steps in one go, and four with a checkpoint after some that another step resumes."""
    workload = workload_of("mlp", "AdamW")
    whole = deploy(workload, load_plan(path))
    first = deploy(workload, load_plan(path))
    for number in range(STEPS):
        whole(batch_of("mlp", number))
    for number in range(cut):
        first(batch_of("mlp", number))
    refused = save_settled(first, folder)
    again = deploy(workload, load_plan(path))
    load_checkpoint(again, folder)
    for number in range(cut, STEPS):
        again(batch_of("mlp", number))
    return refused, whole.state_dict(), again.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("codec", ["", "top_k=20"])
def test_a_checkpoint_holds_every_island_and_the_outer_momentum(
    ranks: Ranks, tmp_path: Path, codec: str
) -> None:
    """AdamW's moments, and what codecs leave out, differ between islands.

    The resumed run is the uninterrupted one.
    """
    path = tmp_path / "plan.json"
    graph = graph_of("mlp", "AdamW")
    strategy = averaged("mlp", DILOCO, optimizer="AdamW", piped=True)
    if codec:
        strategy = coded(strategy, graph, codec)
    plan_of(graph, strategy).save(path)
    for refused, whole, again in ranks.run(interrupted, str(path), str(tmp_path / "even"), 2):
        assert not refused
        if whole is not None:
            torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-7)
    texts = [each[0] for each in ranks.run(interrupted, str(path), str(tmp_path / "odd"), 1)]
    assert all("call settle() on every rank" in text for text in texts)


def test_the_outer_step_is_that_of_torch() -> None:
    anchor = torch.tensor([1.0, -2.0])
    wanted = [anchor.clone()]
    sgd = torch.optim.SGD(wanted, lr=0.7, momentum=0.9, nesterov=True)
    state = OuterState(anchor.clone(), torch.zeros(2))
    for average in (torch.tensor([0.5, -1.0]), torch.tensor([0.0, 0.5])):
        wanted[0].grad = wanted[0] - average
        sgd.step()
        difference = state.anchor - average
        torch.testing.assert_close(outer_step(state, difference, DILOCO), wanted[0])


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that ops read and write.

    Attributes:
        num_bytes: Number of bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op; views and new memory move nothing."""
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in {"aten::new_empty", "aten::empty"}:
            return made
        given = dict(zip([each.name for each in func._schema.arguments], args, strict=False))
        given |= kwargs or {}
        writes_in_place = False
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            size = sum(
                each.nbytes
                for each in (value if isinstance(value, list) else [value])
                if isinstance(each, Tensor)
            )
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            writes_in_place |= is_written
            is_read = argument.name != "out" and not (
                is_written and name in {"aten::copy_", "aten::zero_"}
            )
            self.num_bytes += size * (is_written + is_read)
        self.num_bytes += 0 if writes_in_place else made.nbytes
        return made


class Alone(Communicator):
    """A communicator whose collectives have ended before they begin."""

    def _open(self, devices: tuple[int, ...]) -> Any:
        return None

    def all_reduce(self, tensor: Tensor, devices: tuple[int, ...]) -> Pending:
        """The tensor as it is."""
        return Pending(None, lambda: tensor)

    def all_gather(
        self,
        part: Tensor,
        devices: tuple[int, ...],
        counts: Sequence[int],
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Pending:
        """Nothing has come."""
        return Pending(None, lambda: combine([]))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize(
    "averaging",
    [Averaging(every=2), DILOCO, replace(DILOCO, delay=1), Averaging(every=3, delay=2)],
)
def test_a_rank_moves_the_bytes_that_are_stated(
    monkeypatch: pytest.MonkeyPatch, rank: int, codec: str, has_masters: bool, averaging: Averaging
) -> None:
    """What the simulator prices is what the ops of an averaging read and write."""
    graph = replace(graph_of("mlp"), master_dtype="float64" if has_masters else "")
    strategy = averaged("mlp", averaging)
    strategy = coded(strategy, graph, codec) if codec else strategy
    named = dict(workload_of("mlp").make_model().named_parameters())
    parameters = {each: named[graph.tensors[each].name] for each in graph.parameters}
    masters = Masters(torch.float64 if has_masters else None, list(parameters.values()))
    averager = Averager(graph, strategy, rank, parameters, masters, Alone(rank, ()))
    nothing = torch.empty(0, dtype=torch.uint8)
    monkeypatch.setattr(averager.feedback, "encode", lambda key, change, codec: nothing)
    (bucket,) = averager.every_bucket
    sends = not codec or rank in bucket.senders
    before = passes_before(averaging, has_codec=bool(codec), sends=sends)
    after = passes_after(averaging, has_codec=bool(codec))
    with torch.no_grad():
        with Moved() as moved:
            averager.begin_average(keeps_sent=averaging.delay > 0)
        assert moved.num_bytes == bucket.num_bytes * times_moved(before)
        with Moved() as moved:
            averager.end_average()
        rounded = bucket.num_bytes + bucket.rounded_bytes if has_masters else 0.0
        assert moved.num_bytes == bucket.num_bytes * times_moved(after) + rounded


def clipped(rank: int, path: str) -> str:
    try:
        deploy(workload_of("mlp"), load_plan(path), max_grad_norm=1.0)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_clipping_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), averaged("mlp", Averaging(every=2))).save(path)
    assert all("islands or stages of this plan" in text for text in ranks.run(clipped, str(path)))


def left_out_by_parameter(step: DeployedStep) -> dict[int, Tensor]:
    """What codecs have left out here, by row of ``graph.updates``; nothing adds up to zeros."""
    averager = next(mode for mode in step.modes if isinstance(mode, Averager))
    found: dict[int, Tensor] = {}
    for bucket in averager.every_bucket:
        flat = averager.feedback.left_out.get(changes_key(bucket))
        if flat is not None:
            sizes = [averager.outer[row].anchor.numel() for row in bucket.rows]
            found |= dict(zip(bucket.rows, torch.split(flat, sizes), strict=True))
    return found


def handed_over(
    rank: int, path: str, other: str, folder: str
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What is left out when a run is saved, and when islands cut otherwise resume it."""
    step = deploy(workload_of("mlp"), load_plan(path))
    for number in range(2):
        step(batch_of("mlp", number))
    save_checkpoint(step, folder)
    again = deploy(workload_of("mlp"), load_plan(other))
    load_checkpoint(again, folder)
    return left_out_by_parameter(step), left_out_by_parameter(again)


@pytest.mark.distributed
def test_what_all_islands_left_out_goes_to_the_first_of_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    """It is what is still missing in the parameters, whoever sends them."""
    graph, paths = graph_of("mlp"), [tmp_path / "plan.json", tmp_path / "other.json"]
    for path, idle in zip(paths, (False, True), strict=True):
        strategy = coded(averaged("mlp", Averaging(every=2), idle=idle), graph, "top_k=8")
        plan_of(graph, strategy).save(path)
    found = ranks.run(handed_over, *map(str, paths), str(tmp_path / "saved"))
    first, *others = [again for _, again in found]
    assert set(first) == set(range(len(graph.updates)))
    for row, value in first.items():
        total = found[0][0][row] + found[1][0][row]
        torch.testing.assert_close(value, total)
        assert all(float(each[row].abs().sum()) == 0.0 for each in others if row in each)


def test_a_rehearsal_plays_an_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that would not take part in it is found before anything runs."""
    captured = capture_step(workload_of("mlp"))
    strategy = coded(averaged("mlp", DILOCO, piped=True), captured.graph, "int8")
    plan = plan_of(captured.graph, strategy)

    def fault() -> str:
        program = lower(captured.graph, plan.cluster, strategy)
        return rehearse(captured, strategy, program, plan.task_order)

    assert fault() == ""
    begin = Averager.begin_average

    def all_but_one(self: Averager, *, keeps_sent: bool = False) -> None:
        if self._rank != 1:
            begin(self, keeps_sent=keeps_sent)

    monkeypatch.setattr(Averager, "begin_average", all_but_one)
    assert fault() == "rank 0, averaging: rank 1 has not begun to send what is waited for"
