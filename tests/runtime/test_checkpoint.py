"""Checkpoints: another plan goes on where the first one stopped, as one device would have."""

import json
import os
import pickle
import random
import resource
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from heterog.cluster import Cluster
from heterog.errors import HeterogError, InputFileError, StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.runtime.checkpoint import files, load_checkpoint, read_contents, save_checkpoint
from heterog.runtime.checkpoint import steps as checkpoint
from heterog.runtime.checkpoint.contents import Contents, SavedOptimizer, checksum_of
from heterog.runtime.checkpoint.files import read_tensors
from heterog.runtime.checkpoint.state import new_options
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.runtime.cases import MODELS, NORMALISED, batch_of, captured_once
from tests.runtime.ranks import PARENT, Ranks
from tests.simulator.builders import cluster_of, plan_by_hand
from tests.thorough import one_in

ADAM = ("Adam", {"lr": 1e-2})
MOMENTUM = ("SGD", {"lr": 0.1, "momentum": 0.9})
Optimizer = tuple[str, dict[str, float]]

SHARES = Decision(devices=(0, 1, 2), shares=(5, 2, 1))
OTHER_SHARES = Decision(devices=(0, 1, 2), shares=(1, 0, 7), sync=Sync.HIERARCHICAL)
ZERO = {
    stage: Decision(devices=(0, 1, 2), shares=(5, 2, 1), sync=stage, slices=(2, 0, 3))
    for stage in (Sync.ZERO1, Sync.ZERO2, Sync.ZERO3)
}
SERVER = Decision(devices=(0, 1, 2), shares=(4, 3, 1), sync=Sync.PARAMETER_SERVER)


def workload_of(name: str, optimizer: Optimizer) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        made = (MODELS | NORMALISED)[name][0]()
        assert isinstance(made, nn.Module)
        return made

    loss = (MODELS | NORMALISED)[name][1]
    kind = getattr(torch.optim, optimizer[0])
    return Workload(seeded, batch_of(name, 0), loss, kind, optimizer[1], name=name)


def cluster(num_devices: int) -> Cluster:
    return cluster_of(*[(1.0, ["T4"])] * num_devices)


def save_plan(
    path: Path,
    graph: OpGraph,
    decisions: list[Decision],
    *,
    home: int = REPLICATED,
    num_devices: int = 3,
    bucket_bytes: int = 0,
) -> str:
    """Write the plan of decisions, given in turns to the groups."""
    groups = group_ops(graph)
    chosen = tuple(decisions[index % len(decisions)] for index in range(groups.num_groups))
    homes = [
        home if chosen[int(groups.group[op])].sync == Sync.PARAMETER_SERVER else REPLICATED
        for op, _, _ in graph.updates
    ]
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster(num_devices).fingerprint,
        decisions=chosen,
        homes=tuple(homes),
        bucket_bytes=bucket_bytes,
    )
    plan = plan_by_hand(graph, cluster(num_devices), strategy)
    plan.save(path)
    return str(path)


def reference(
    name: str, optimizer: Optimizer, num_steps: int, lr_after_2: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one device that never stops."""
    workload = workload_of(name, optimizer)
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    for number in range(num_steps):
        if number == 2 and lr_after_2 is not None:
            stepper.param_groups[0]["lr"] = lr_after_2
        loss = workload.step_loss(model, batch_of(name, number))
        stepper.zero_grad()
        torch.autograd.backward(loss)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def captured(name: str, optimizer: Optimizer) -> OpGraph:
    """A graph that ranks have captured, too."""
    return PARENT.capture(("checkpoint", name, str(optimizer)), workload_of, name, optimizer)


def deployed(name: str, optimizer: Optimizer, plan: str) -> DeployedStep:
    """A deployed plan; each rank captures each model and optimizer once."""
    with captured_once(("checkpoint", name, str(optimizer))):
        return deploy(workload_of(name, optimizer), load_plan(plan))


def train(
    rank: int,
    name: str,
    optimizer: Optimizer,
    plan: str,
    steps: tuple[int, int],
    resume: str = "",
    save: str = "",
    new_lr: float | None = None,
) -> tuple[list[float], dict[str, Tensor] | None, dict[str, Any]]:
    """Deploy, resume, train from one step to another, save."""
    step = deployed(name, optimizer, plan)
    extra = load_checkpoint(step, resume) if resume else {}
    assert step.num_steps == steps[0], "for the seeds of random ops"
    losses = [float(step(batch_of(name, number))) for number in range(*steps)]
    if new_lr is not None:
        step.optimizer.param_groups[0]["lr"] = new_lr
    if save:
        save_checkpoint(step, save, extra={"epoch": 1, "by": f"rank {rank}"})
    return losses, step.state_dict(), extra


def train_without_unpickling(rank: int, plan: str, folder: str) -> dict[str, Any]:
    """Deploy, load, train and save where unpickling anything is an error."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something is unpickled")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "loads", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        patch.setattr(torch.distributed.distributed_c10d, "_tensor_to_object", refuse)
        return train(rank, "mlp", ADAM, plan, (2, 3), folder, folder + "-more")[2]


def refused(rank: int, name: str, optimizer: Optimizer, plan: str, folder: str) -> str:
    """What loading says, and that the step is as it was."""
    step = deployed(name, optimizer, plan)
    before = {key: value.clone() for key, value in step.model.state_dict().items()}
    try:
        load_checkpoint(step, folder)
    except HeterogError as error:
        after = step.model.state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        return f"{type(error).__name__}: {error}"
    return "loaded"


def full_disk(rank: int, name: str, optimizer: Optimizer, plan: str, folder: str) -> str:
    """What saving says where no file may grow beyond a few bytes."""
    step = deployed(name, optimizer, plan)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        save_checkpoint(step, folder)
    except HeterogError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def save_refused(rank: int, plan: str, folder: str, kind: str) -> str:
    """What saving says when something stands in its way."""
    step = deployed("mlp", ADAM, plan)
    extra: dict[str, Any] = {}
    if kind == "disk" and rank == 1:
        # A disk that is full for one rank only.
        checkpoint.write_tensors = _full_disk  # type: ignore[assignment, attr-defined]
    if kind == "extra":
        extra = {"number": {1, 2}}
    if kind == "option":
        step.optimizer.param_groups[0]["lr"] = print
    if kind == "folder" and rank == 1:
        checkpoint._from_rank_0 = lambda number: _from_rank_0(number) + 5
    try:
        save_checkpoint(step, folder, extra=extra)
    except HeterogError as error:
        return str(error)
    finally:
        checkpoint.write_tensors = _write_tensors  # type: ignore[attr-defined]
        checkpoint._from_rank_0 = _from_rank_0
    return "saved"


_write_tensors = files.write_tensors
_from_rank_0 = checkpoint._from_rank_0


def _full_disk(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return captured("mlp", ADAM)


@pytest.fixture(scope="module")
def saved(ranks: Ranks, graph: OpGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of uneven data parallelism after two steps."""
    folder = tmp_path_factory.mktemp("saved")
    plan = save_plan(folder / "plan.json", graph, [SHARES])
    ranks.run(train, "mlp", ADAM, plan, (0, 2), "", str(folder / "checkpoint"))
    return folder / "checkpoint"


def check_goes_on(
    results: list[tuple[list[float], dict[str, Tensor] | None, dict[str, Any]]],
    name: str,
    optimizer: Optimizer,
    lr_after_2: float | None = None,
) -> None:
    losses, weights = reference(name, optimizer, 4, lr_after_2)
    for each, _, extra in results:
        assert each == pytest.approx(losses[2:], rel=1e-5)
        assert extra == {"epoch": 1, "by": "rank 0"}
    state = results[0][1]
    assert state is not None
    torch.testing.assert_close(state, weights, rtol=1e-4, atol=2e-5)


PLANS = {
    "the same": ([SHARES], REPLICATED),
    "other shares": ([OTHER_SHARES], REPLICATED),
    "server": ([SERVER], 1),
    "groups on single devices": (
        [Decision(devices=(2,), shares=(8,)), Decision(devices=(0,), shares=(8,))],
        REPLICATED,
    ),
    "slices of the state": ([ZERO[Sync.ZERO1]], REPLICATED),
    "slices of everything": ([ZERO[Sync.ZERO3]], REPLICATED),
    "mixed": ([SHARES, Decision(devices=(1, 2), shares=(5, 3)), SERVER], 2),
}


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("case", PLANS)
def test_another_plan_goes_on_as_one_device_would(
    ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path, case: str
) -> None:
    decisions, home = PLANS[case]
    plan = save_plan(tmp_path / "plan.json", graph, decisions, home=home)
    check_goes_on(ranks.run(train, "mlp", ADAM, plan, (2, 4), str(saved)), "mlp", ADAM)


@pytest.mark.distributed
@pytest.mark.parametrize("stage", ZERO)
def test_slices_go_on_as_other_slices_and_whole(
    ranks: Ranks, two_ranks: Ranks, graph: OpGraph, tmp_path: Path, stage: Sync
) -> None:
    """Saved as ranks have them, in buckets that are cut through parameters."""
    folder = str(tmp_path / "checkpoint")
    plan = save_plan(tmp_path / "plan.json", graph, [ZERO[stage]], bucket_bytes=700)
    ranks.run(train, "mlp", ADAM, plan, (0, 2), "", folder)
    contents = read_contents(folder)
    files = {tensor.file for name, tensor in contents.tensors.items() if tensor.whole}
    assert files == {"__0_0.distcp", "__2_0.distcp"}, "rank 1 owns nothing"
    assert ("model.0.weight" in contents.parts) == (stage == Sync.ZERO3)
    assert len(contents.parts["optimizer.2.weight.exp_avg"]) == 4, (
        "two runs of elements, cut in the middle of a row"
    )
    shards = Decision(devices=(1, 2), shares=(5, 3), sync=Sync.ZERO3)
    for decisions in ([SHARES], [shards, ZERO[Sync.ZERO2]]):
        plan = save_plan(tmp_path / "plan.json", graph, decisions, bucket_bytes=300)
        check_goes_on(ranks.run(train, "mlp", ADAM, plan, (2, 4), folder), "mlp", ADAM)
    fewer = Decision(devices=(0, 1), shares=(2, 6), sync=Sync.ZERO3, slices=(1, 4))
    plan = save_plan(tmp_path / "plan.json", graph, [fewer], num_devices=2)
    check_goes_on(two_ranks.run(train, "mlp", ADAM, plan, (2, 4), folder), "mlp", ADAM)


@pytest.mark.distributed
@pytest.mark.parametrize("change", ["lose", "move"])
def test_parts_that_do_not_fit_together(
    ranks: Ranks, graph: OpGraph, tmp_path: Path, change: str
) -> None:
    plan = save_plan(tmp_path / "plan.json", graph, [ZERO[Sync.ZERO3]])
    folder = tmp_path / "checkpoint"
    ranks.run(train, "mlp", ADAM, plan, (0, 1), "", str(folder))
    index = folder / "checkpoint.json"
    record = json.loads(index.read_text())
    assert record["schema_version"] == 4
    *_, name = read_contents(folder).parts["model.0.weight"]
    if change == "lose":
        del record["tensors"][name]
    else:
        record["tensors"][name]["offsets"][0] += 1
    index.write_text(json.dumps({**record, "sha256": checksum_of(record)}))
    with pytest.raises(InputFileError, match=r"leave a gap or overlap at|reaches out of its"):
        read_contents(folder)


@pytest.mark.distributed
def test_a_smaller_cluster_goes_on_as_one_device_would(
    two_ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path
) -> None:
    """Back and forth would be the same: a checkpoint does not know how many ranks wrote it."""
    decisions = [Decision(devices=(0, 1), shares=(2, 6)), Decision(devices=(1,), shares=(8,))]
    plan = save_plan(tmp_path / "plan.json", graph, decisions, num_devices=2)
    check_goes_on(two_ranks.run(train, "mlp", ADAM, plan, (2, 4), str(saved)), "mlp", ADAM)


@pytest.mark.distributed
def test_parameters_that_live_in_one_place_and_a_changed_learning_rate_are_kept(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Saved by different owners (rank 0 owns nothing), with a tied weight; momentum."""
    graph = captured("language", MOMENTUM)
    one = Decision(devices=(1,), shares=(8,))
    alone = save_plan(tmp_path / "alone.json", graph, [one])
    folder = str(tmp_path / "checkpoint")
    ranks.run(train, "language", MOMENTUM, alone, (0, 2), "", folder, 0.02)
    assert {each.file for each in read_contents(folder).tensors.values()} == {"__1_0.distcp"}
    together = save_plan(tmp_path / "together.json", graph, [SHARES])
    results = ranks.run(train, "language", MOMENTUM, together, (2, 4), folder)
    check_goes_on(results, "language", MOMENTUM, lr_after_2=0.02)


@pytest.mark.distributed
def test_statistics_are_those_of_the_first_replica_with_samples(
    ranks: Ranks, tmp_path: Path
) -> None:
    graph = captured("normalised", MOMENTUM)
    last = save_plan(tmp_path / "last.json", graph, [Decision(devices=(2,), shares=(8,))])
    folder = str(tmp_path / "checkpoint")
    ranks.run(train, "normalised", MOMENTUM, last, (0, 2), "", folder)
    everywhere = save_plan(tmp_path / "everywhere.json", graph, [SHARES])
    results = ranks.run(train, "normalised", MOMENTUM, everywhere, (2, 2), folder)
    _, weights = reference("normalised", MOMENTUM, 2)
    state = results[0][1]
    assert state is not None
    torch.testing.assert_close(state, weights)


class Versioned(nn.Linear):
    """A layer that keeps more than tensors, as some layers in eight bits do."""

    def get_extra_state(self) -> dict[str, list[int]]:
        return {"version": [1, 2]}

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        assert state == {"version": [1, 2]}


def versioned() -> Workload:
    batch = (torch.ones(8, 6), torch.zeros(8, 4))
    return Workload(
        lambda: nn.Sequential(Versioned(6, 4)), batch, nn.functional.mse_loss, torch.optim.SGD
    )


def extra_state(_rank: int, plan: str) -> dict[str, Any] | None:
    step = deploy(versioned(), load_plan(plan))
    step(versioned().make_batch())
    return step.state_dict()


@pytest.mark.distributed
def test_a_state_dict_has_what_modules_keep_beside_tensors(ranks: Ranks, tmp_path: Path) -> None:
    plan = save_plan(tmp_path / "plan.json", capture_step(versioned()).graph, [SHARES])
    state, *others = ranks.run(extra_state, plan)
    assert others == [None, None]
    model = versioned().make_model()
    model.load_state_dict(state)  # strict: nothing is missing, and the layer got what it gave
    assert state["0._extra_state"] == {"version": [1, 2]}


@pytest.mark.distributed
def test_every_tensor_is_written_once_and_torch_can_read_it(saved: Path, tmp_path: Path) -> None:
    contents = read_contents(saved)
    _, weights = reference("mlp", ADAM, 2)
    states = {f"optimizer.{name}.{key}" for name in weights for key in _ADAM_STATE}
    assert set(contents.tensors) == {f"model.{name}" for name in weights} | states
    data = saved / contents.data
    assert [path.name for path in data.glob("*.distcp")] == ["__0_0.distcp"], (
        "by the first replica"
    )
    last = max(each.offset + each.num_bytes for each in contents.tensors.values())
    assert (data / "__0_0.distcp").stat().st_size == last
    assert contents.optimizer == "Adam"
    assert contents.graph == captured("mlp", ADAM).fingerprint
    assert contents.states["0.weight"].options["betas"] == [0.9, 0.999]
    dcp_to_torch_save(data, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    torch.testing.assert_close(
        {name: whole[f"model.{name}"] for name in weights}, dict(weights), rtol=1e-4, atol=2e-5
    )


_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.distributed
def test_nothing_is_unpickled(ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path) -> None:
    """Neither from files nor from the network."""
    plan = save_plan(tmp_path / "plan.json", graph, [SHARES, SERVER], home=1)
    results = ranks.run(train_without_unpickling, plan, str(saved))
    assert results == [{"epoch": 1, "by": "rank 0"}] * 3


@pytest.mark.distributed
def test_a_step_that_never_ran_and_saving_again(
    ranks: Ranks, graph: OpGraph, tmp_path: Path
) -> None:
    plan = save_plan(tmp_path / "plan.json", graph, [SERVER], home=2)
    folder = tmp_path / "checkpoint"
    ranks.run(train, "mlp", ADAM, plan, (0, 0), "", str(folder))
    assert not any(name.startswith("optimizer.") for name in read_contents(folder).tensors)
    results = ranks.run(train, "mlp", ADAM, plan, (0, 2), str(folder), str(folder))
    assert results[1][0] == pytest.approx(reference("mlp", ADAM, 2)[0], rel=1e-5)
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "data-1"], "the old one is gone"
    check_goes_on(ranks.run(train, "mlp", ADAM, plan, (2, 4), str(folder)), "mlp", ADAM)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("disk", "rank 1: [Errno 28] No space left on device"),
        ("folder", "made by rank 0, is not there on rank 1; save to a folder that all ranks"),
        ("extra", "'extra' cannot be saved as JSON: Object of type set"),
        ("option", "the optimizer's 'lr' is <built-in function print>; a checkpoint can keep"),
    ],
)
def test_a_rank_that_cannot_save_leaves_the_old_checkpoint(
    ranks: Ranks, graph: OpGraph, tmp_path: Path, kind: str, text: str
) -> None:
    plan = save_plan(tmp_path / "plan.json", graph, [SHARES])
    folder = tmp_path / "checkpoint"
    assert ranks.run(save_refused, plan, str(folder), "nothing") == ["saved"] * 3
    before = read_contents(folder)
    for said in ranks.run(save_refused, plan, str(folder), kind):
        assert text in said
    assert read_contents(folder) == before
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "data-0"]


@pytest.mark.distributed
def test_what_cannot_be_loaded_is_refused_on_every_rank(
    ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path
) -> None:
    plan = save_plan(tmp_path / "plan.json", graph, [SHARES])

    def said(folder: Path) -> set[str]:
        return set(ranks.run(refused, "mlp", ADAM, plan, str(folder)))

    assert said(tmp_path / "nowhere") == {
        f"InputFileError: cannot read checkpoint {tmp_path}/nowhere/checkpoint.json: "
        "No such file or directory."
    }
    other = captured("residual", ADAM)
    other_plan = save_plan(tmp_path / "other.json", other, [SHARES])
    assert set(ranks.run(refused, "residual", ADAM, other_plan, str(saved))) == {
        f"StrategyError: checkpoint {saved} of 'mlp' is of another model: stem.weight is missing "
        "there and (4, 3, 3, 3) float32 here."
    }
    momentum = captured("mlp", MOMENTUM)
    momentum_plan = save_plan(tmp_path / "momentum.json", momentum, [SHARES])
    assert set(ranks.run(refused, "mlp", MOMENTUM, momentum_plan, str(saved))) == {
        f"StrategyError: checkpoint {saved} of 'mlp' has the state of Adam, but the workload "
        "trains with SGD; resume with the same optimizer."
    }
    frozen = asdict(read_contents(saved))["states"]
    del frozen["4.bias"]
    assert said(damaged(saved, tmp_path / "frozen", {"states": frozen})) == {
        f"StrategyError: checkpoint {tmp_path}/frozen of 'mlp' has no optimizer state for 4.bias, "
        "which was not trained then."
    }


def damaged(saved: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other fields."""
    record = {"schema_version": 4, **asdict(read_contents(saved)), **changes}
    contents: dict[str, Any] = json.loads(json.dumps(record))
    folder.mkdir()
    text = json.dumps({**contents, "sha256": checksum_of(contents)})
    (folder / "checkpoint.json").write_text(text)
    for path in (saved / "data-0").iterdir():
        (folder / "data-0").mkdir(exist_ok=True)
        (folder / "data-0" / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.distributed
def test_damaged_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(InputFileError) as caught:
            read_contents(folder)
        return str(caught.value)

    cut = damaged(saved, tmp_path / "cut", {})
    file = cut / "data-0" / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    assert said(cut).endswith(f"__0_0.distcp has {size - 1} bytes of {size}.")
    file.unlink()
    assert said(cut).endswith("data-0/__0_0.distcp is missing.")
    index = cut / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:-100])
    assert "is not valid JSON" in said(cut)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"schema_version": 7}, "has schema_version 7; this heterog reads 4"),
        ({"data": "../../etc"}, "no data folder has the name '../../etc'"),
        ({"tensors": {"model.0.weight": {}}}, "field 'tensors.model.0.weight.shape' is missing"),
        ({"tensors": 3}, "field 'tensors' should be a valid dict"),
        (_tensor(file="/etc/passwd"), "x cannot be in a file '/etc/passwd'"),
        (_tensor(dtype="load"), "torch has no dtype 'load'"),
        (_part([0], [2]), "a part of x has other dimensions than its 2"),
        (_part([0, 0], [2, 2]), "the parts of x leave a gap or overlap at [0, 2]"),
        (_part([1, 0], [2, 3]), "a part of x reaches out of its (2, 3)"),
        (_part([], [7]), "a part of x has other dimensions than its 2"),
        ({"tensors": {}}, "'step' of 0.weight is nowhere"),
    ]
    for number, (changes, text) in enumerate(cases):
        assert text in said(damaged(saved, tmp_path / str(number), changes))


@pytest.mark.distributed
def test_a_flipped_bit_is_never_resumed(saved: Path, tmp_path: Path) -> None:
    """Any byte of it: either nothing reads it, or the checksum is wrong."""

    def everything(folder: Path) -> dict[str, torch.Tensor]:
        contents = read_contents(folder)
        return read_tensors(contents, folder, list(contents.tensors))

    wanted, contents = everything(saved), read_contents(saved)
    folder = tmp_path / "flipped"
    shutil.copytree(saved, folder)
    rng = random.Random(0)
    refused = 0
    for path in [folder / "checkpoint.json", *sorted((folder / "data-0").glob("*.distcp"))] * 60:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
        try:
            found = everything(folder)
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
            assert asdict(read_contents(folder)) == asdict(contents)
        except InputFileError:
            refused += 1
        path.write_bytes(content)
    assert refused > 60, "at least every change of the index"


@pytest.mark.distributed
def test_a_full_disk_says_what_was_needed_and_keeps_the_old(
    ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plan = save_plan(tmp_path / "plan.json", graph, [SHARES])
    for said in ranks.run(full_disk, "mlp", ADAM, plan, str(folder)):
        assert "File too large; it needs " in said, said
        assert "free there. What was there before is unchanged." in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def _tensor(file: str = "__0_0.distcp", dtype: str = "float32") -> dict[str, Any]:
    one = {"shape": [1], "dtype": dtype, "file": file, "offset": 0, "num_bytes": 1}
    one["sha256"] = "0" * 64
    return {"tensors": {"x": one}}


def _part(offsets: list[int], shape: list[int]) -> dict[str, Any]:
    """One box of a tensor of 2 x 3 elements."""
    one = {"shape": shape, "dtype": "uint8", "file": "__0_0.distcp", "offset": 0, "num_bytes": 9}
    one["sha256"] = "0" * 64
    return {
        "tensors": {"x[0:1]": {**one, "whole": "x", "whole_shape": [2, 3], "offsets": offsets}}
    }


@pytest.mark.distributed
def test_a_damaged_tensor_leaves_every_rank_as_it_was(
    ranks: Ranks, graph: OpGraph, saved: Path, tmp_path: Path
) -> None:
    plan = save_plan(tmp_path / "plan.json", graph, [SHARES])
    folder = damaged(saved, tmp_path / "damaged", {})
    file = folder / "data-0" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    for said in ranks.run(refused, "mlp", ADAM, plan, str(folder)):
        assert said.startswith(f"InputFileError: cannot read checkpoint {folder}: ")


def options_of(*saved: dict[str, Any]) -> list[dict[str, Any]]:
    """What a group of as many parameters becomes, each with its own saved options."""
    names = "ab"[: len(saved)]
    optimizer = torch.optim.Adam([torch.ones(1) for _ in names], lr=torch.tensor(0.1))
    states = {
        name: SavedOptimizer(options=options, tensors=(), values={})
        for name, options in zip(names, saved, strict=True)
    }
    contents = Contents(
        heterog="", torch="", model="", graph="", optimizer="Adam", num_steps=0, data="data-0",
        tensors={}, states=states, extra={},
    )  # fmt: skip
    return new_options(optimizer.param_groups, [[name] for name in names], contents)


def test_options_keep_their_types_and_what_a_scheduler_added() -> None:
    (group,) = options_of({"lr": 0.5, "betas": [0.8, 0.9], "initial_lr": 1.0})
    assert torch.equal(group["lr"], torch.tensor(0.5))
    assert group["betas"] == (0.8, 0.9)
    assert group["initial_lr"] == 1.0
    assert group["eps"] == 1e-8, "not saved, so as it is"
    assert group["params"] == [0]


def test_different_options_within_one_group_are_refused() -> None:
    with pytest.raises(StrategyError, match="'a' and 'b' are in one group of the optimizer, but"):
        options_of({"lr": 0.1}, {"lr": 0.2})
