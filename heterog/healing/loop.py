"""Healing for a user's own loop under torchrun: its state survives lost ranks, even mid-epoch.

torchrun ends all ranks when one is lost and starts those that are left. Hosts without the newest
snapshot get it from one that has it, and all go on with the step after it. A loop has
``HealingLoop.restore`` before it and ``end_step`` in it (``docs/healing.md`` shows one).
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.balance.balancer import Balancer
from heterog.balance.shares import shares_from_speeds
from heterog.balance.streams import Stateful
from heterog.errors import HeterogError
from heterog.files import CHECKPOINT_INDEX, check_save_folder
from heterog.healing import elastic
from heterog.healing.elastic import LEAVE_S, folder_of_host, gather, on_sigterm, say, set_silence
from heterog.healing.shelf import ANEW, NEVER, Moment, Shelf, Snapshot, newest_complete, parts_of
from heterog.healing.snapshots import SnapshotWriter
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import option_like
from heterog.runtime.ranks.forks import end_with_parent

_OF_OBJECTS = "objects.{}"
"""Name of a tensor that the state of an object has, by its number."""


class HealingLoop:
    """Keeps the state of a training loop in the memory of every host, outside of its ranks.

    Every rank has all parameters, as under ``DistributedDataParallel``, so every host keeps all of
    the state, of which each of its ranks writes a part: nothing is sent, and any host that is left
    has what the others need.

    Args:
        model: The model as wrapped; any wrapper will do.
        optimizer: The optimizer of its parameters.
        balancer: The balancer whose loader the loop uses.
        others: Further objects with a state to keep, by name: a scheduler, an average. All ranks
            have the same ones, with equally many tensors.
        checkpoint: Folder of a checkpoint written beside training; empty for none.
        checkpoint_s: Seconds between checkpoints.
        silent_s: Seconds without an answer after which a rank gives up waiting for another one
            whose machine is not cut off, so that torchrun starts those that are left, from the
            second step on. More than any rank takes for one; 0 leaves the timeout of the process
            group.

    Attributes:
        num_steps: Number of steps done, in all epochs and by all generations of ranks.
        resumed_from: The step or folder that ``restore`` resumed from; empty on a first start.

    Raises:
        HeterogError: parameters are sharded, ranks have different objects, there is no process
            group, or no checkpoint can be written into the folder.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        balancer: Balancer,
        *,
        others: Mapping[str, Stateful] | None = None,
        checkpoint: str = "",
        checkpoint_s: float = 60.0,
        silent_s: float = 0.0,
    ) -> None:
        if checkpoint:  # on every rank: any may be the first one later
            check_save_folder(Path(checkpoint))
        if not dist.is_initialized():
            raise HeterogError("HealingLoop needs the process group; call init_process_group.")
        # Where it is not imported, nothing is sharded; to import it takes each rank a second.
        sharded = sys.modules.get("torch.distributed.tensor")
        if sharded and any(isinstance(each, sharded.DTensor) for each in model.parameters()):
            raise HeterogError(
                "HealingLoop takes parameters that every rank has whole, and these are sharded; "
                "use DistributedDataParallel, or save them by torch.distributed.checkpoint."
            )
        self.num_steps = 0
        self.resumed_from = ""
        self._model, self._optimizer, self._balancer = model, optimizer, balancer
        self._others = dict(others or {})
        nums_tensors = {}
        for of, states in self._objects().items():
            for name, state in states.items():
                tensors: list[Tensor] = []
                try:
                    json.dumps(_said(state, tensors))
                except TypeError as error:
                    raise HeterogError(
                        f"HealingLoop: no snapshot can hold {name} of the {of} ({error}); its "
                        "state may have tensors, dicts, lists, tuples, numbers and texts."
                    ) from error
                nums_tensors[f"{name} of the {of}"] = len(tensors)
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        who = f"{socket.gethostname()}:{os.environ.get('LOCAL_RANK', '0')}"
        said = gather([who, nums_tensors])
        self._who = [each for each, _ in said]
        _check_alike([each for _, each in said])
        elastic.end_cut_links()
        self._silent_s = silent_s
        self._local = int(os.environ.get("LOCAL_RANK", self._rank))
        self._num_local = int(os.environ.get("LOCAL_WORLD_SIZE", self._num_ranks))
        self._shelf = Shelf(folder_of_host())
        self._writer: SnapshotWriter | None = None
        self._checkpoint, self._checkpoint_s = checkpoint, checkpoint_s
        self._writing: Any = None
        self._leaves = threading.Event()
        if threading.current_thread() is threading.main_thread():
            on_sigterm(self._leaves.set, min(silent_s or LEAVE_S, LEAVE_S))
        if "TORCHELASTIC_RUN_ID" in os.environ:  # without its agent nobody could restart it
            end_with_parent(os.getppid())

    def restore(self) -> bool:
        """Restore the state of the previous ranks; False if there is none. All ranks call it."""
        parts = self._shelf.parts()
        own = newest_complete([parts])
        seen = max((part.moment.generation for part in parts), default=-1)
        host = int(os.environ.get("GROUP_RANK", "0"))
        told = gather([host, seen, own])
        generation = 1 + max(seen for _, seen, _ in told)
        hosts, part = [host for host, _, _ in told], (self._local, self._num_local)
        self._writer = SnapshotWriter(self._shelf, generation, part, hosts, say=_say_failed)
        found = [Moment(*each) if each else NEVER for _, _, each in told]
        if (newest := max(found)).num_parts:
            self._writer.bring(name for part in parts_of(newest) for name in part.files)
            snapshot = Snapshot(self._shelf, newest)
            contents, random = snapshot.contents, f"random.{self._local}"
            about = {**contents.extra, "num_steps": contents.num_steps}
            about = gather(about)[found.index(newest)]
            names = [name for name in contents.tensors if "random." not in name]
            self._take_over(about, snapshot.read(names))
            if own == newest and random in contents.tensors:
                torch.set_rng_state(snapshot.read([random])[random].clone())
            self.resumed_from = f"step {self.num_steps} in memory"
        elif self._checkpoint and (Path(self._checkpoint) / CHECKPOINT_INDEX).exists():
            from heterog.runtime.checkpoint.contents import read_contents
            from heterog.runtime.checkpoint.files import read_tensors  # a second on every rank

            folder = Path(self._checkpoint)
            contents = read_contents(folder)
            names = [name for name in contents.names if "random." not in name]
            about = {**contents.extra, "num_steps": contents.num_steps}
            self._take_over(about, read_tensors(contents, folder, names))
            self.resumed_from = f"checkpoint {folder}"
        elif self._rank == 0 and elastic.has_met():
            say(ANEW)
        return bool(self.resumed_from)

    def end_step(self) -> None:
        """Call on all ranks, last in the step; may take a snapshot.

        Ends this rank, with a snapshot everywhere, if torchrun has told it to end (SIGTERM): the
        host leaves, or another one joins.
        """
        self.num_steps += 1
        if self._writer is None:
            raise HeterogError("HealingLoop: call restore before the first step.")
        with self._balancer.clock.waiting():
            is_next, is_left = self._writer.end_step(self._leaves.is_set())
        if self._silent_s:  # ranks may start at different times, and compile in their first step
            set_silence(self._silent_s)
            self._silent_s = 0.0
        if not (is_next or is_left):
            return
        tensors: list[Tensor] = []
        about = self._about(_said(self._objects(), tensors))
        self._writer.take(self.num_steps, self._entries(tensors), {}, about)
        if is_left:
            with self._balancer.clock.waiting():
                dist.barrier()  # all have taken it
            if self._leaves.is_set():
                elastic.exit_now()
        if self._checkpoint and self._rank == 0:
            if self._writing is None:
                from heterog.healing.checkpoints import Writing  # half a second on every rank

                self._writing = Writing(Path(self._checkpoint), self._checkpoint_s, say)
            self._writing.look(lambda: self._shelf.folder)

    def close(self) -> None:
        """End the writing of checkpoints; the snapshots go when torchrun ends."""
        if self._writing is not None:
            self._writing.close()

    # --- parts -----------------------------------------------------------------------------------

    def _objects(self) -> dict[str, dict[str, Any]]:
        """States of the model's modules beside tensors (``get_extra_state``), and of others."""
        state = getattr(self._model, "module", self._model).state_dict()
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        return {
            "model": extra,
            "others": {n: each.state_dict() for n, each in self._others.items()},
        }

    def _entries(self, of_objects: Sequence[Tensor]) -> list[Entry]:
        """Tensors that this rank writes; those of a host have about equally many bytes each."""
        module = getattr(self._model, "module", self._model)
        every = {f"model.{name}": value for name, value in module.state_dict().items()}
        for number, values in self._optimizer.state_dict()["state"].items():
            every |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        every |= {_OF_OBJECTS.format(number): value for number, value in enumerate(of_objects)}
        every = {name: value for name, value in every.items() if isinstance(value, Tensor)}
        sizes = [0] * self._num_local
        own = []
        for name in sorted(every, key=lambda each: (-every[each].nbytes, each)):
            rank = sizes.index(min(sizes))
            sizes[rank] += every[name].nbytes
            if rank == self._local:
                own.append(Entry.of_whole(name, every[name]))
        own.append(Entry.of_whole(f"random.{self._local}", torch.get_rng_state()))
        return own

    def _about(self, objects: object) -> dict[str, Any]:
        """State without tensors that goes into the index; only that of rank 0 is read."""
        state = self._optimizer.state_dict()
        values = {
            str(number): {key: each for key, each in kept.items() if not isinstance(each, Tensor)}
            for number, kept in state["state"].items()
        }
        extra = {
            "balancer": self._balancer.state_dict(),
            "groups": [_plain(group) for group in state["param_groups"]],
            "values": values,
            "objects": objects,
            "who": self._who,
        }
        return {
            "model": "loop",
            "graph": "loop",
            "optimizer": type(self._optimizer).__name__,
            "num_steps": self.num_steps,
            "extra": extra,
        }

    def _take_over(self, extra: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the state of the loop from what was read."""
        module = getattr(self._model, "module", self._model)
        prefix = "model."
        read = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        objects = _heard(extra.get("objects", extra), tensors)  # those of 0.3 have each apart
        module.load_state_dict({**read, **objects.get("model", {})})
        state: dict[int, dict[str, Any]] = {
            int(number): dict(values) for number, values in extra["values"].items()
        }
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                number, _, key = rest.partition(".")
                state.setdefault(int(number), {})[key] = value.clone()
        groups = [
            {key: option_like(now.get(key), value) for key, value in saved.items()}
            for now, saved in zip(self._optimizer.param_groups, extra["groups"], strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, each in self._others.items():
            each.load_state_dict(objects["others"][name])
        self.num_steps = int(extra["num_steps"])
        self._balancer.load_state_dict(extra["balancer"])
        self._share_out(extra["who"], extra["balancer"]["sampler"]["shares"])

    def _share_out(self, who: Sequence[str], shares: Sequence[int]) -> None:
        """Give ranks that were there before their old shares, and new ranks the mean."""
        if list(who) == self._who:
            return
        had: dict[str, list[int]] = {}
        for name, share in zip(who, shares, strict=True):
            had.setdefault(name, []).append(share)
        mean = max(sum(shares) / len(shares), 1.0)
        speeds = [float(had[name].pop(0)) if had.get(name) else mean for name in self._who]
        sampler = self._balancer.share_sampler
        sampler.set_shares(shares_from_speeds([max(s, 1.0) for s in speeds], sum(shares)))


def _say_failed(why: str) -> None:
    say(f"no snapshot was taken: {why}")


def _check_alike(nums_tensors: Sequence[Mapping[str, int]]) -> None:
    """Ranks write tensors of objects by turns, so all must have them.

    Args:
        nums_tensors: For each rank its objects and the numbers of their tensors.
    """
    first = nums_tensors[0]
    for rank, found in enumerate(nums_tensors):
        for name in sorted({*first, *found}):
            if first.get(name) != found.get(name):
                has = [each.get(name, "no") for each in (first, found)]
                raise HeterogError(
                    f"HealingLoop: all ranks need the same objects, and {name} has {has[0]} "
                    f"tensors on rank 0 and {has[1]} on rank {rank}; give them to all ranks."
                )


def _said(state: object, tensors: list[Tensor]) -> object:
    """A state as values of JSON, without its tensors, which are added to a list."""
    match state:
        case Tensor():
            tensors.append(state)
            return {"heterog.tensor": len(tensors) - 1}
        case Mapping():
            pairs = [(_said(key, tensors), _said(each, tensors)) for key, each in state.items()]
            return {"heterog.pairs": pairs}
        case tuple():
            return {"heterog.tuple": [_said(each, tensors) for each in state]}
        case list():
            return [_said(each, tensors) for each in state]
    return state


def _heard(said: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that was said so, with tensors that were read."""
    match said:
        case {"heterog.tensor": number}:
            return tensors[_OF_OBJECTS.format(number)].clone()
        case {"heterog.pairs": pairs}:
            return {_heard(key, tensors): _heard(each, tensors) for key, each in pairs}
        case {"heterog.tuple": values}:
            return tuple(_heard(each, tensors) for each in values)
        case list():
            return [_heard(each, tensors) for each in said]
    return said


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the optimizer as values that JSON can hold."""
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()
    }
