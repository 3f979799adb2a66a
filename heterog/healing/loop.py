"""Healing for a user's own loop under torchrun: its state survives lost ranks, even mid-epoch.

    balancer = heterog.Balancer(model, global_batch_size=96)
    loader = balancer.loader(dataset)
    healing = HealingLoop(model, optimizer, balancer)
    healing.restore()                          # after the loader is made; nothing on a first start
    while balancer.share_sampler.epoch < 10:
        for inputs, targets in loader:
            ...
            optimizer.step()
            healing.end_step()
    healing.close()

    torchrun --nnodes 2:4 --rdzv-backend c10d --max-restarts 100 -m examples.balance.elastic_ddp

torchrun ends all ranks when one is lost and starts those that are left. They read the newest
complete snapshot from the keepers of the hosts that are left and go on with the step after it.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from heterog.balance.balancer import Balancer
from heterog.balance.shares import shares_from_speeds
from heterog.errors import HeterogError
from heterog.healing.assignment import in_turn
from heterog.healing.checkpoints import Writing
from heterog.healing.keepers import KeeperPlace, Keepers
from heterog.healing.near_keeper import near_keeper
from heterog.healing.restoring import Snapshot
from heterog.healing.sending import Sender
from heterog.healing.snapshots import Moment
from heterog.runtime.checkpoint.contents import Contents, read_contents
from heterog.runtime.checkpoint.files import Entry, read_tensors
from heterog.runtime.checkpoint.held import whole_box
from heterog.runtime.launch import CHECKPOINT_INDEX
from heterog.runtime.step.collectives import gather_texts


class Stateful(Protocol):
    """Any other object with a state: a scheduler, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of values that JSON can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Set the state from what ``state_dict`` returned."""


class HealingLoop:
    """Keeps the state of a training loop outside of its ranks.

    Every rank has all parameters, as under ``DistributedDataParallel``; each sends a part of them,
    so that together the ranks send the state once, and once more for each further copy.

    Args:
        model: The model as wrapped; any wrapper will do.
        optimizer: The optimizer of its parameters.
        balancer: The balancer whose loader the loop uses.
        redundancy: Number of keepers on other hosts that also hold each part.
        others: Further objects with a state to keep, by name.
        checkpoint: Folder of a checkpoint written beside training; empty for none.
        checkpoint_s: Seconds between checkpoints.
        silent_s: Seconds without an answer after which a rank gives up waiting for another one,
            so that torchrun starts those that are left: a link that is cut says nothing. More
            than any rank takes for a step; 0 leaves the timeout of the process group.

    Attributes:
        num_steps: Number of steps done, in all epochs and by all generations of ranks.
        resumed_from: The step or folder that ``restore`` resumed from; empty on a first start.

    Raises:
        HeterogError: parameters are sharded, or there is no process group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        balancer: Balancer,
        *,
        redundancy: int = 1,
        others: Mapping[str, Stateful] | None = None,
        checkpoint: str = "",
        checkpoint_s: float = 60.0,
        silent_s: float = 0.0,
    ) -> None:
        if not dist.is_initialized():
            raise HeterogError("HealingLoop needs the process group; call init_process_group.")
        if any(isinstance(value, DTensor) for value in model.parameters()):
            raise HeterogError(
                "HealingLoop takes parameters that every rank has whole, and these are sharded; "
                "use DistributedDataParallel, or save them by torch.distributed.checkpoint."
            )
        self.num_steps = 0
        self.resumed_from = ""
        self._model, self._optimizer, self._balancer = model, optimizer, balancer
        self._others = dict(others or {})
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._copies = 1 + redundancy
        self._checkpoint = checkpoint
        self._host = int(os.environ.get("GROUP_RANK", "0"))
        self._places = self._meet()
        if silent_s:  # from here on: ranks may start at different times
            set_silence(silent_s)
        self._who = gather_texts(f"{socket.gethostname()}:{os.environ.get('LOCAL_RANK', '0')}")
        self._sender: Sender | None = None
        self._generation = 0
        self._on_its_way: Moment | None = None
        self._settled: Moment | None = None
        self._writing: Writing | None = None
        if checkpoint and self._rank == 0:
            self._writing = Writing(Path(checkpoint), checkpoint_s)

    def restore(self) -> bool:
        """Restore the state of the previous ranks; False if there is none. All ranks call it."""
        with Keepers(self._places) as keepers:
            parts = keepers.parts()
            newest = keepers.newest()
            # Not all ranks may reach all keepers: the first one decides.
            seen = max(
                (part.moment.generation for own in parts.values() for part in own), default=-1
            )
            told = torch.tensor([*(newest or (-1, -1)), seen])
            dist.broadcast(told, 0)
            generation, step, seen = told.tolist()
            self._generation = seen + 1
            if step >= 0:
                self._settled = Moment(generation, step)
                snapshot = Snapshot(keepers, self._settled, self._host)
                names = list(snapshot.contents.tensors)
                self._take_over(snapshot.contents, snapshot.read(names))
                self.resumed_from = f"step {step} in memory"
        if not self.resumed_from and self._checkpoint:
            folder = Path(self._checkpoint)
            if (folder / CHECKPOINT_INDEX).exists():
                contents = read_contents(folder)
                self._take_over(contents, read_tensors(contents, folder, contents.names))
                self.resumed_from = f"checkpoint {folder}"
        return bool(self.resumed_from)

    def end_step(self) -> None:
        """Call on all ranks after the optimizer's step; may begin a snapshot."""
        self.num_steps += 1
        if self._sender is None:
            keepers = Keepers(in_turn(self._places, self._host))
            self._sender = Sender(
                list(keepers.reached.values()),
                copies=self._copies,
                rank=self._rank,
                num_ranks=self._num_ranks,
                generation=self._generation,
            )
        said = torch.tensor([int(self._sender.is_busy), int(self._sender.has_failed)])
        with self._balancer.clock.waiting():
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
        is_busy, has_failed = (bool(each) for each in said.tolist())
        if is_busy:
            return
        if self._on_its_way is not None and not has_failed:
            self._settled = self._on_its_way
        self._sender.send(self.num_steps, self._entries(), {}, self._about(), self._settled)
        self._on_its_way = Moment(self._generation, self.num_steps)
        if self._writing is not None:
            self._writing.look(self._places)

    def close(self) -> None:
        """Close the connections to the keepers, which end with torchrun."""
        if self._sender is not None:
            self._sender.close()
        if self._writing is not None:
            self._writing.close()

    # --- parts -----------------------------------------------------------------------------------

    def _meet(self) -> list[KeeperPlace]:
        """Exchange where the keepers of all hosts are."""
        text = ""
        if int(os.environ.get("LOCAL_RANK", self._rank)) == 0:
            text = json.dumps(asdict(near_keeper(self._host)))
        places = [KeeperPlace(**json.loads(said)) for said in gather_texts(text) if said]
        return sorted(places, key=lambda place: place.host)

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors with elements, by name; the same names on every rank."""
        module = getattr(self._model, "module", self._model)
        named = {f"model.{name}": value for name, value in module.state_dict().items()}
        state = self._optimizer.state_dict()["state"]
        for number, values in state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    named[f"optimizer.{number}.{key}"] = value
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def _entries(self) -> list[Entry]:
        """Tensors that this rank sends; ranks have about equally many bytes each."""
        sizes = [0] * self._num_ranks
        own = []
        every = self._tensors()
        for name in sorted(every, key=lambda each: (-every[each].nbytes, each)):
            rank = sizes.index(min(sizes))
            sizes[rank] += every[name].nbytes
            if rank == self._rank:
                own.append(_entry(name, every[name]))
        own.append(_entry(f"random.{self._rank}", torch.get_rng_state()))
        return own

    def _about(self) -> dict[str, Any]:
        """State without tensors that goes into the index; only that of rank 0 is read."""
        state = self._optimizer.state_dict()
        values = {
            str(number): {key: each for key, each in kept.items() if not isinstance(each, Tensor)}
            for number, kept in state["state"].items()
        }
        return {
            "model": "loop",
            "graph": "loop",
            "optimizer": type(self._optimizer).__name__,
            "num_steps": self.num_steps,
            "extra": {
                "balancer": self._balancer.state_dict(),
                "groups": [_plain(group) for group in state["param_groups"]],
                "values": values,
                "others": {name: each.state_dict() for name, each in self._others.items()},
                "who": self._who,
            },
        }

    def _take_over(self, contents: Contents, tensors: Mapping[str, Tensor]) -> None:
        """Set the state of the loop from what was read."""
        extra = contents.extra
        module = getattr(self._model, "module", self._model)
        prefix = "model."
        module.load_state_dict(
            {n.removeprefix(prefix): each for n, each in tensors.items() if n.startswith(prefix)}
        )
        state: dict[int, dict[str, Any]] = {
            int(number): dict(values) for number, values in extra["values"].items()
        }
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                number, _, key = rest.partition(".")
                state.setdefault(int(number), {})[key] = value.clone()
        groups = [
            {key: _like(now.get(key), value) for key, value in saved.items()}
            for now, saved in zip(self._optimizer.param_groups, extra["groups"], strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        for name, each in self._others.items():
            each.load_state_dict(extra["others"][name])
        random = tensors.get(f"random.{self._rank}")
        if random is not None:
            torch.set_rng_state(random.clone())
        self.num_steps = contents.num_steps
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


def set_silence(seconds: float) -> None:
    """Set the timeout of collectives; there is no public function for it."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def _entry(name: str, value: Tensor) -> Entry:
    shape = tuple(value.shape)
    return Entry(whole=name, shape=shape, box=whole_box(shape), value=value)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the optimizer as values that JSON can hold."""
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()
    }


def _like(now: Any, saved: Any) -> Any:
    """A saved option converted to the type that the optimizer uses, which JSON has lost."""
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved
