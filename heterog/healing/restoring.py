"""Loading the newest snapshot from keepers into a deployed step of any plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heterog import __version__
from heterog.healing.keepers import Keepers, holders
from heterog.healing.sending import unpack
from heterog.healing.snapshots import Moment, Part
from heterog.healing.wire import WireError
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedTensor,
    states_from_json,
    tensors_from_json,
)
from heterog.runtime.checkpoint.files import read_boxes
from heterog.runtime.checkpoint.held import check_tiling
from heterog.runtime.checkpoint.state import NewState, check_fits
from heterog.runtime.deploy import DeployedStep


class Snapshot:
    """A complete snapshot in keepers, readable while the keepers are connected.

    Args:
        keepers: Keepers that hold its parts.
        moment: Generation and step of the snapshot.
        near: Host whose keeper is asked first.

    Attributes:
        contents: Index of the snapshot, in the form of a checkpoint's.
        num_bytes: Bytes read so far.
        far_bytes: Bytes of those that came from keepers of other hosts.

    Raises:
        WireError: no keeper has one of the parts.
        ValueError: the parts of a tensor do not cover all of it.
    """

    def __init__(self, keepers: Keepers, moment: Moment, near: int = -1) -> None:
        self._keepers, self._near = keepers, near
        parts = keepers.parts()
        self._at = holders(parts, moment)
        self._parts = {
            part.number: part for own in parts.values() for part in own if part.moment == moment
        }
        self.num_bytes = self.far_bytes = 0
        indices = []
        for number in sorted(self._parts):
            indices.append(self._ask(number, lambda keeper, part: keeper.index(part)))
        if len(indices) != next(iter(self._parts.values())).num_parts:
            raise WireError(f"the snapshot of step {moment.step} is not complete any more.")
        self.contents = _contents(indices)

    @property
    def numbers(self) -> list[int]:
        """Numbers of its parts, ascending."""
        return sorted(self._parts)

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Read tensors, or boxes of tensors, by the name under which they were sent."""
        return {name: self._tensor(self.contents.tensors[name]) for name in names}

    def _tensor(self, saved: SavedTensor) -> Tensor:
        number = part_of(saved)
        content = self._ask(
            number, lambda keeper, part: keeper.get(part, saved.offset, saved.num_bytes)
        )
        self.num_bytes += saved.num_bytes
        return unpack(content, saved)

    def _ask(self, number: int, question: Any) -> Any:
        """Ask the nearest keeper that has a part; if it is lost, the next one."""
        part: Part = self._parts[number]
        # Ranks begin at different keepers, so that not all read from one.
        hosts = sorted(self._at[number], key=lambda host: (host != self._near, host))
        if self._near not in hosts:
            turn = self._near % len(hosts)
            hosts = hosts[turn:] + hosts[:turn]
        for host in hosts:
            keeper = self._keepers.reached.get(host)
            if keeper is None:
                continue
            try:
                keeper.pin(part)
                answer = question(keeper, part)
            except (WireError, OSError):
                self._keepers.reached.pop(host).close()
                continue
            if host != self._near and isinstance(answer, bytearray):
                self.far_bytes += len(answer)
            return answer
        raise WireError(f"part {number} of step {part.moment.step} was lost while it was read.")


def part_of(saved: SavedTensor) -> int:
    """The number of the part that holds a tensor; the index stores it as the file name."""
    return int(saved.file.split("_")[2])


def restore(step: DeployedStep, snapshot: Snapshot) -> None:
    """Load a snapshot into a freshly deployed step; every rank calls it.

    Raises:
        StrategyError: the snapshot is of another model, or the plan cuts what cannot be cut.
    """
    model = step.model
    where = Path("in memory")
    check_fits(step, model, snapshot.contents, where)
    state = NewState(step, model, snapshot.contents)
    read_boxes(snapshot.contents, where, state.wanted, read=snapshot.read)
    state.check_counters()
    state.take_over()


def _contents(indices: Sequence[Mapping[str, Any]]) -> Contents:
    """Merge the indices of all parts into one like a checkpoint's."""
    first = indices[0]
    tensors: dict[str, SavedTensor] = {}
    for index in indices:
        tensors |= tensors_from_json(index["tensors"])
    contents = Contents(
        heterog=__version__,
        torch=torch.__version__,
        model=str(first["model"]),
        graph=str(first["graph"]),
        optimizer=str(first["optimizer"]),
        num_steps=int(first["num_steps"]),
        data="",
        tensors=tensors,
        states={
            name: state
            for index in indices
            for name, state in states_from_json(index["states"]).items()
        },
        extra=dict(first.get("extra", {})),
    )
    for whole, names in contents.parts.items():
        check_tiling(
            whole,
            contents.shape(whole),
            [piece.box for name in names for piece in contents.tensors[name].pieces],
        )
    return contents
