"""Checkpoints of a deployed step, which another plan can resume.

    folder/
      checkpoint.json     what is saved and where, the optimizer's options, whatever else was given
      data-3/             written by torch.distributed.checkpoint
        __0_0.distcp      tensors that rank 0 owns
        __1_0.distcp

Everything is kept by the name of its parameter and written once, by the rank whose copy counts; so
a plan for other devices, shares, homes or another number of ranks finds what it needs. What ranks
own in slices (ZeRO) each writes as it has it: ``model.weight[10:20]`` are elements of the tensor,
flattened. All ranks must see the folder.

A new checkpoint gets a data folder of its own, and ``checkpoint.json`` is replaced when all of it
is there: a crash at any time leaves the old one.

Nothing is unpickled, neither from files nor from the network: ranks exchange JSON, and tensors are
read by ``torch.load(weights_only=True)``. torch's own description of such a folder is a pickle
(``data-3/.metadata``); it is written for torch's tools, ``checkpoint.json`` is what is read here.
"""

import json
import math
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from heterog import __version__
from heterog.errors import HeterogError, InputFileError, StrategyError
from heterog.files import check_writable, read_json, write_json
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import TensorKind
from heterog.runtime.checkpoint_slices import begun_here, load_slices, name_and_shape, own_parts
from heterog.runtime.collectives import gather_texts
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.launch import CHECKPOINT_INDEX

SCHEMA_VERSION = 2
"""Of a checkpoint with parts of tensors; 1 without, as before there were any."""
_DATA = re.compile(r"data-(\d+)")
_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Where a tensor is: ``num_bytes`` of a file from ``offset`` on.

    Of a part of a larger tensor, ``whole`` is the larger one's name, ``begin`` the part's first
    element in it and ``whole_shape`` its shape.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    num_bytes: int
    whole: str = ""
    begin: int = 0
    whole_shape: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Of a part, the element after its last in the larger tensor."""
        return self.begin + math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """What the optimizer knew about one parameter.

    Attributes:
        options: of its parameter group; ``lr`` is the one at the time of saving.
        tensors: names of its state that are tensors.
        values: the rest of its state.
    """

    options: Mapping[str, Any]
    tensors: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds, as ``checkpoint.json`` says it.

    Attributes:
        heterog: version that wrote it.
        torch: version that wrote it.
        model: name of the workload.
        graph: fingerprint of the step's graph; another batch size, say, has another one.
        optimizer: class name.
        num_steps: that were trained.
        data: name of the folder with the tensors.
        tensors: by name, ``model.`` or ``optimizer.`` before that of the parameter.
        states: the optimizer's, by parameter.
        extra: what the caller wanted to keep.
    """

    heterog: str
    torch: str
    model: str
    graph: str
    optimizer: str
    num_steps: int
    data: str
    tensors: Mapping[str, SavedTensor]
    states: Mapping[str, SavedOptimizer]
    extra: Mapping[str, Any]

    @cached_property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Names of the parts of each tensor that was saved in parts, from first to last."""
        found: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.whole:
                found.setdefault(tensor.whole, []).append(name)
        return {
            whole: sorted(names, key=lambda name: self.tensors[name].begin)
            for whole, names in found.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor.

        Raises:
            KeyError: there is none of this name.
        """
        if name in self.parts:
            return self.tensors[self.parts[name][0]].whole_shape
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a whole tensor."""
        return self.tensors[self.parts[name][0] if name in self.parts else name].dtype


def save_checkpoint(
    step: DeployedStep, folder: str | Path, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Save parameters, buffers and the optimizer's state; every rank calls it.

    A replicated parameter comes from its first replica, one with a home from its home. BatchNorm
    statistics come from the first replica that has samples (rank 0 in plain data parallelism):
    the other replicas have seen other samples, and theirs are not kept.

    Args:
        step: between two steps.
        folder: made if it is not there; a checkpoint in it is replaced.
        extra: JSON values to keep beside it: the epoch, say. Rank 0's are kept.

    Raises:
        HeterogError: a rank cannot write, or the optimizer keeps what JSON and tensors cannot
            hold. Every rank raises, and the old checkpoint is still there.
        StrategyError: the plan shards parameters by rules of ops.
    """
    _check_whole(step)
    step.flush()
    target = Path(folder)
    index = target / CHECKPOINT_INDEX
    number = 0
    with _together():
        if step.rank == 0:
            number = _make_data_folder(target)
    data = target / f"data-{_from_rank_0(number)}"
    tensors: dict[str, SavedTensor] = {}
    states: dict[str, SavedOptimizer] = {}
    try:
        with _together():
            if not data.is_dir():
                raise InputFileError(
                    f"{data}, made by rank 0, is not there on rank {step.rank}; save to a folder "
                    "that all ranks share."
                )
            own, states = _own_state(step)
            parts = {part.name: part for part in own_parts(step)}
            own |= {name: part.value for name, part in parts.items()}
            tensors = _write_tensors(own, data, step.rank)
            tensors |= {
                name: replace(
                    tensors[name], whole=each.whole, begin=each.begin, whole_shape=each.whole_shape
                )
                for name, each in parts.items()
            }
        # Parts of the index are small, and collected as text.
        said = gather_texts(json.dumps([_to_json(tensors), _to_json(states)]))
        with _together():
            if step.rank == 0:
                graph = step.captured.graph
                contents = Contents(
                    heterog=__version__,
                    torch=torch.__version__,
                    model=graph.name,
                    graph=graph.fingerprint,
                    optimizer=graph.optimizer,
                    num_steps=step.num_steps,
                    data=data.name,
                    tensors=_tensors_from_json(_merge(json.loads(part)[0] for part in said)),
                    states=_states_from_json(_merge(json.loads(part)[1] for part in said)),
                    extra=dict(extra or {}),
                )
                _publish(contents, index, data)
    except HeterogError:
        if step.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def load_checkpoint(step: DeployedStep, folder: str | Path) -> dict[str, Any]:
    """Bring a step to where a saved one was; every rank calls it.

    The plan may be another one than that of the saved step: each rank reads what it holds or
    updates now. BatchNorm statistics become the saved ones on every rank. Random ops go on with
    the numbers of the next step, for which the step needs the seed of the saved one.

    Args:
        step: freshly deployed; its model and optimizer class are those of the saved one.
        folder: as given to ``save_checkpoint``.

    Returns:
        The ``extra`` values that were saved.

    Raises:
        InputFileError: no checkpoint, or a damaged one.
        StrategyError: the checkpoint is of another model or optimizer; names what differs first.
            Or the plan shards parameters by rules of ops.
    """
    _check_whole(step)
    step.flush()
    # Into new tensors: a rank that fails leaves all ranks as they were.
    with _together():
        contents = read_contents(folder)
        _check_fits(step, contents, folder)
        targets = _held_tensors(step)
        stepped = _stepped(step)
        state_names = [
            f"optimizer.{names[0]}.{state}"
            for bucket, names in stepped
            if bucket is None
            for state in contents.states[names[0]].tensors
        ]
        loaded = _read_tensors(contents, Path(folder), [*targets, *state_names])
        slices, slice_states = load_slices(
            step,
            lambda name, begin, end: _read_range(contents, Path(folder), name, begin, end),
            contents.shape,
            lambda name: contents.states[name].tensors,
            lambda name: contents.states[name].values,
        )
        options = _new_options(step, contents)
    with torch.no_grad():
        for name, value in targets.items():
            value.copy_(loaded[name])
        for bucket_number, value in slices.items():
            step.slices.own[bucket_number].copy_(value)
    states: dict[int, dict[str, Any]] = {}
    for number, (bucket, (name, *_)) in enumerate(stepped):
        if bucket is not None:
            if bucket in slice_states:
                states[number] = slice_states[bucket]
            continue
        saved = contents.states[name]
        tensors = {key: loaded[f"optimizer.{name}.{key}"] for key in saved.tensors}
        if tensors or saved.values:
            states[number] = {**tensors, **saved.values}
    step.optimizer.load_state_dict({"state": states, "param_groups": options})
    step.num_steps = contents.num_steps
    return dict(contents.extra)


def read_contents(folder: str | Path) -> Contents:
    """What a checkpoint holds; also checks that its files are all there.

    Raises:
        InputFileError: no checkpoint, of another version, or a damaged one.
    """
    index = Path(folder) / CHECKPOINT_INDEX
    record = read_json(index, "checkpoint")
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version not in (1, SCHEMA_VERSION):
        raise InputFileError(
            f"checkpoint {index} has schema_version {version!r}; this heterog reads 1 to "
            f"{SCHEMA_VERSION}."
        )
    try:
        contents = Contents(
            heterog=str(record["heterog"]),
            torch=str(record["torch"]),
            model=str(record["model"]),
            graph=str(record["graph"]),
            optimizer=str(record["optimizer"]),
            num_steps=int(record["num_steps"]),
            data=str(record["data"]),
            tensors=_tensors_from_json(record["tensors"]),
            states=_states_from_json(record["states"]),
            extra=dict(record["extra"]),
        )
        # The names become paths: none may lead out of the folder.
        if not _DATA.fullmatch(contents.data):
            raise ValueError(f"no data folder has the name {contents.data!r}")
        for name, tensor in contents.tensors.items():
            if not _FILE.fullmatch(tensor.file):
                raise ValueError(f"{name} cannot be in a file {tensor.file!r}")
            _dtype(tensor.dtype)
        for name, state in contents.states.items():
            for key in state.tensors:
                if f"optimizer.{name}.{key}" not in {**contents.tensors, **contents.parts}:
                    raise ValueError(f"'{key}' of {name} is nowhere")
        for whole, names in contents.parts.items():
            _check_complete(contents, whole, names)
    except KeyError as error:
        raise InputFileError(f"checkpoint {index}: field {error} is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise InputFileError(f"checkpoint {index} does not make sense: {error}.") from error
    _check_files(contents, index.parent)
    return contents


# --- what belongs to a checkpoint ----------------------------------------------------------------


def _names(step: DeployedStep) -> list[str]:
    """Name of each updated parameter, in the order of ``graph.updates``."""
    graph = step.captured.graph
    return [graph.tensors[parameter].name for _, parameter, _ in graph.updates]


def _stepped(step: DeployedStep) -> list[tuple[int | None, list[str]]]:
    """What this rank's optimizer has, in its order: (bucket of a slice, names of parameters)."""
    name_of = {id(value): name for name, value in step.model.named_parameters()}
    found: list[tuple[int | None, list[str]]] = []
    for value in (value for group in step.optimizer.param_groups for value in group["params"]):
        bucket = step.slices.of_parameter(value)
        if bucket is None:
            found.append((None, [name_of[id(value)]]))
        else:
            pieces = bucket.pieces(step.rank)
            found.append((bucket.number, [name_and_shape(step, each.row)[0] for each in pieces]))
    return found


def _model_tensors(step: DeployedStep) -> dict[str, Tensor]:
    """All parameters and persistent buffers of the model, whether this rank needs them or not."""
    every_name = {name for name, _ in step.model.named_parameters(remove_duplicate=False)}
    state = step.model.state_dict()
    found = {name: value.detach() for name, value in step.model.named_parameters()}
    found |= {
        name: value
        for name, value in state.items()
        if name not in every_name and isinstance(value, Tensor)
    }
    return {f"model.{name}": value for name, value in found.items()}


def _check_whole(step: DeployedStep) -> None:
    graph = step.captured.graph
    if step.sharded:
        name = graph.tensors[graph.updates[min(step.sharded)][1]].name
        raise StrategyError(
            f"the plan shards {len(step.sharded)} parameters ('{name}' first) over devices, which "
            "checkpoints cannot hold yet. Keep step.state_dict() instead, which has them whole on "
            "rank 0, or plan without op rules."
        )


def _held_tensors(step: DeployedStep) -> dict[str, Tensor]:
    """What a rank needs of the model: its parameters, those nobody trains, and all buffers."""
    graph = step.captured.graph
    held = {graph.tensors[parameter].name for parameter in step.parameters} - _in_slices(step)
    foreign = {f"model.{name}" for name in set(_names(step)) - held}
    return {name: value for name, value in _model_tensors(step).items() if name not in foreign}


def _in_slices(step: DeployedStep) -> set[str]:
    """Names of the parameters that no rank has whole."""
    return {
        name_and_shape(step, row)[0]
        for bucket in step.buckets
        if bucket.stage == 3
        for row in bucket.rows
    }


def _owners(step: DeployedStep) -> dict[str, int]:
    """Rank that saves each tensor of the model; rank 0 saves what is the same everywhere."""
    graph = step.captured.graph
    group = group_ops(graph).group
    decisions = step.plan.strategy.decisions
    # A replica without samples has no statistics.
    sampled = [
        [device for device, share in zip(each.devices, each.shares, strict=True) if share]
        for each in decisions
    ]
    owners = {f"model.{name}": step._owner(row) for row, name in enumerate(_names(step))}
    for op, node in enumerate(graph.ops):
        # What depends on no sample (counters) is computed wherever there are any.
        having = sampled[group[op]] if group[op] >= 0 else [min(map(min, sampled))]
        for tensor in node.inputs:
            if graph.tensors[tensor].kind == TensorKind.BUFFER:
                owners.setdefault(f"model.{graph.tensors[tensor].name}", having[0])
    parts = {f"model.{name}" for name in _in_slices(step)}
    return {name: owners.get(name, 0) for name in _model_tensors(step) if name not in parts}


def _own_state(step: DeployedStep) -> tuple[dict[str, Tensor], dict[str, SavedOptimizer]]:
    """(tensors, optimizer states by parameter) that this rank saves."""
    owners = _owners(step)
    model = _model_tensors(step)
    own = {name: value for name, value in model.items() if owners.get(name) == step.rank}
    states: dict[str, SavedOptimizer] = {}
    stepped = iter(_stepped(step))
    for group in step.optimizer.param_groups:
        options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            bucket, (name, *_) = next(stepped)
            state = step.optimizer.state.get(parameter, {})
            kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            values = {key: _plain(key, state[key]) for key in state if key not in kept}
            saved = SavedOptimizer(options=options, tensors=tuple(kept), values=values)
            if bucket is not None:
                # Of each parameter that begins here; the slices' elements are saved as parts.
                kept = {key: v for key, v in kept.items() if v.shape != parameter.shape}
                mine = begun_here(step, bucket)
            else:
                mine = [name] if owners[f"model.{name}"] == step.rank else []
            for each in mine:
                own |= {f"optimizer.{each}.{key}": value.detach() for key, value in kept.items()}
                states[each] = saved
    return own, states


def _plain(key: str, value: Any) -> Any:
    """A value as JSON can hold it.

    Raises:
        StrategyError: it cannot.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(key, each) for each in value]
    number = isinstance(value, float) and math.isfinite(value)
    if value is None or number or isinstance(value, bool | int | str):
        return value
    raise StrategyError(
        f"the optimizer's '{key}' is {value!r}; a checkpoint can keep tensors, finite numbers and "
        "text. Save the optimizer's state yourself."
    )


def _like(current: Any, saved: Any) -> Any:
    """A saved option in the type that the optimizer uses, which JSON may have lost."""
    if isinstance(current, Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved


def _new_options(step: DeployedStep, contents: Contents) -> list[dict[str, Any]]:
    """This rank's parameter groups with the saved options."""
    names = iter(
        (number, name) for number, (_, each) in enumerate(_stepped(step)) for name in each
    )
    # A rank that updates nothing has an empty group, for the sake of schedulers.
    some = [*(state.options for state in contents.states.values()), {}][:1]
    result = []
    for group in step.optimizer.param_groups:
        members = list(names)  # torch makes one group of what it is given
        options = [contents.states[name].options for _, name in members] or some
        for (_, name), other in zip(members, options, strict=False):
            if other != options[0]:
                raise StrategyError(
                    f"'{members[0][1]}' and '{name}' are in one group of the optimizer, but had "
                    f"different options when they were saved: {options[0]} and {other}."
                )
        # Also those that a scheduler has added.
        saved = {key: _like(group.get(key), value) for key, value in options[0].items()}
        numbers = list(dict.fromkeys(number for number, _ in members))
        result.append({**group, **saved, "params": numbers})
    return result


# --- checks --------------------------------------------------------------------------------------


def _check_fits(step: DeployedStep, contents: Contents, folder: str | Path) -> None:
    """Refuse a checkpoint of another model or optimizer."""
    what = f"checkpoint {folder} of '{contents.model}'"
    saved = {
        name.removeprefix("model."): (contents.shape(name), contents.dtype(name))
        for name in dict.fromkeys(each.whole or name for name, each in contents.tensors.items())
        if name.startswith("model.")
    }
    here = {
        name.removeprefix("model."): (tuple(value.shape), _name_of(value.dtype))
        for name, value in _model_tensors(step).items()
    }
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            raise StrategyError(
                f"{what} is of another model: {name} is {_describe(saved.get(name))} there and "
                f"{_describe(here.get(name))} here."
            )
    optimizer = step.captured.graph.optimizer
    if contents.optimizer != optimizer:
        raise StrategyError(
            f"{what} has the state of {contents.optimizer}, but the workload trains with "
            f"{optimizer}; resume with the same optimizer."
        )
    for name in _names(step):
        if name not in contents.states:
            raise StrategyError(
                f"{what} has no optimizer state for {name}, which was not trained then."
            )


def _describe(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {tensor[1]}"


def _check_complete(contents: Contents, whole: str, names: Sequence[str]) -> None:
    """The parts of a tensor follow one another and are all there."""
    shape, dtype = contents.shape(whole), contents.dtype(whole)
    end = 0
    for name in names:
        part = contents.tensors[name]
        if part.begin != end or (part.whole_shape, part.dtype) != (shape, dtype):
            raise ValueError(f"{name} does not follow element {end} of {whole}")
        end = part.end
    if end != math.prod(shape):
        raise ValueError(f"{whole} ends at element {end} of {math.prod(shape)}")


def _check_files(contents: Contents, folder: Path) -> None:
    """Every file that the index names is there, and long enough."""
    needed: dict[str, int] = {}
    for tensor in contents.tensors.values():
        needed[tensor.file] = max(needed.get(tensor.file, 0), tensor.offset + tensor.num_bytes)
    for file, num_bytes in needed.items():
        path = folder / contents.data / file
        if not path.is_file():
            raise InputFileError(f"checkpoint {folder} is incomplete: {path} is missing.")
        if path.stat().st_size < num_bytes:
            raise InputFileError(
                f"checkpoint {folder} is cut off: {path} has {path.stat().st_size} bytes of "
                f"{num_bytes}."
            )


# --- files ---------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """Writes one rank's file and remembers what is where; nothing goes over the network."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self._own_rank = rank
        self.results: list[WriteResult] = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Number the files by the real rank, although every rank writes for itself."""
        super().set_up_storage_writer(is_coordinator, rank=self._own_rank, use_collectives=False)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep what torch would pickle."""
        self.results = [result for each in results for result in each]


class _Reader(FileSystemReader):
    """Reads tensors where the index says they are."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        super().__init__(folder)
        self._contents = contents

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, not torch's pickle of it."""
        return _metadata(self._contents)


def _make_data_folder(target: Path) -> int:
    """A new, empty data folder; its number."""
    if target.is_dir():
        check_writable(target / CHECKPOINT_INDEX)
    else:
        check_writable(target)
        target.mkdir()
    taken = [int(match[1]) for path in target.iterdir() if (match := _DATA.fullmatch(path.name))]
    number = max(taken, default=-1) + 1
    (target / f"data-{number}").mkdir()
    return number


def _write_tensors(own: Mapping[str, Tensor], data: Path, rank: int) -> dict[str, SavedTensor]:
    """Write this rank's file."""
    if not own:
        return {}
    writer = _Writer(data, rank)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with _quiet():
        save(
            dict(own), storage_writer=writer, planner=planner, no_dist=True, use_collectives=False
        )
    saved = {}
    for result in writer.results:
        name, place = result.index.fqn, result.storage_data
        saved[name] = SavedTensor(
            shape=tuple(own[name].shape),
            dtype=_name_of(own[name].dtype),
            file=place.relative_path,
            offset=place.offset,
            num_bytes=place.length,
        )
    return saved


def _read_tensors(contents: Contents, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of these names, put together where they were saved in parts."""
    single = [each for name in names for each in contents.parts.get(name, [name])]
    loaded = _read_saved(contents, folder, single)
    for name in names:
        if name in contents.parts:
            parts = [loaded.pop(each) for each in contents.parts[name]]
            loaded[name] = torch.cat(parts).view(contents.shape(name))
    return loaded


def _read_range(contents: Contents, folder: Path, name: str, begin: int, end: int) -> Tensor:
    """Elements of a flattened tensor, from the parts that have some."""
    if name not in contents.parts:
        return _read_saved(contents, folder, [name])[name].reshape(-1)[begin:end].clone()
    found = []
    for each in contents.parts[name]:
        part = contents.tensors[each]
        low, high = max(begin, part.begin), min(end, part.end)
        if low < high:
            value = _read_saved(contents, folder, [each])[each]
            found.append(value[low - part.begin : high - part.begin])
    return torch.cat(found)


def _read_saved(contents: Contents, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors and parts as they were saved."""
    loaded = {
        name: torch.empty(contents.tensors[name].shape, dtype=_dtype(contents.tensors[name].dtype))
        for name in names
    }
    if loaded:
        reader = _Reader(folder / contents.data, contents)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        try:
            with _quiet():
                load(loaded, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            why = [each for each, _ in error.failures.values()]
            raise InputFileError(
                f"cannot read checkpoint {folder}: {_first_line(why[0])}"
            ) from error
    return loaded


def _publish(contents: Contents, index: Path, data: Path) -> None:
    """Make the new checkpoint the one that counts, then remove older ones."""
    with (data / ".metadata").open("wb") as file:
        pickle.dump(_metadata(contents), file)
    try:
        version = SCHEMA_VERSION if contents.parts else 1
        record = {"schema_version": version, **asdict(contents)}
        write_json(index, {**record, "tensors": _to_json(contents.tensors)})
    except (TypeError, ValueError) as error:
        raise StrategyError(f"'extra' cannot be saved as JSON: {error}.") from error
    for path in index.parent.iterdir():
        if _DATA.fullmatch(path.name) and path.name != data.name:
            shutil.rmtree(path, ignore_errors=True)


def _metadata(contents: Contents) -> Metadata:
    """The index in torch's terms: every tensor is one whole chunk."""
    tensors: dict[str, Any] = {}
    places = {}
    for name, saved in contents.tensors.items():
        zeros = torch.Size([0] * len(saved.shape))
        chunk = ChunkStorageMetadata(offsets=zeros, sizes=torch.Size(saved.shape))
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=_dtype(saved.dtype)),
            size=torch.Size(saved.shape),
            chunks=[chunk],
        )
        places[MetadataIndex(name, zeros)] = _StorageInfo(
            saved.file, saved.offset, saved.num_bytes
        )
    return Metadata(tensors, storage_data=places)


def _to_json(items: Mapping[str, SavedTensor | SavedOptimizer]) -> dict[str, Any]:
    records = {name: asdict(item) for name, item in items.items()}
    for record in records.values():
        if not record.get("whole", True):  # not a part
            for field in ("whole", "begin", "whole_shape"):
                del record[field]
    return records


def _tensors_from_json(record: Mapping[str, Any]) -> dict[str, SavedTensor]:
    return {
        str(name): SavedTensor(
            shape=tuple(int(size) for size in each["shape"]),
            dtype=str(each["dtype"]),
            file=str(each["file"]),
            offset=int(each["offset"]),
            num_bytes=int(each["num_bytes"]),
            whole=str(each.get("whole", "")),
            begin=int(each.get("begin", 0)),
            whole_shape=tuple(int(size) for size in each.get("whole_shape", ())),
        )
        for name, each in record.items()
    }


def _states_from_json(record: Mapping[str, Any]) -> dict[str, SavedOptimizer]:
    return {
        str(name): SavedOptimizer(
            options=dict(each["options"]),
            tensors=tuple(map(str, each["tensors"])),
            values=dict(each["values"]),
        )
        for name, each in record.items()
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """Do without the warning that ranks read and write for themselves, which is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# --- between ranks -------------------------------------------------------------------------------


@contextmanager
def _together() -> Iterator[None]:
    """Wait for all ranks at the end; if the body fails on one of them, it fails on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the others wait for this rank, whatever it is
        error = caught
    said = gather_texts("" if error is None else _first_line(error))
    if error is not None and not isinstance(error, OSError | RuntimeError):
        raise error
    for rank, text in enumerate(said):
        if text:
            raise HeterogError(f"rank {rank}: {text}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    own = isinstance(error, HeterogError | OSError)
    return " ".join([*([] if own else [f"{type(error).__name__}:"]), *lines[:1]])


def _from_rank_0(number: int) -> int:
    shared = torch.tensor([number])
    dist.broadcast(shared, 0)
    return int(shared)


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        assert not merged.keys() & part.keys(), "every tensor has one owner"
        merged |= part
    return merged
