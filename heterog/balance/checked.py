"""A rank of ``heterog check``: runs a training script as it is, for a few updates.

Its arguments are a ``Task`` in JSON, the script, and what the script is given. Batches are dealt
in the task's shares. The rank notes the gradients that each update sees, and what parameters and
buffers were before the first update and after the last one. Then it ends.

Only the division shall make a difference. So all ranks begin with one seed, a data set draws from
a seed of the sample's index, and tensors of random numbers in the loop have their means: dropout
keeps everything. BatchNorm normalises by its running statistics, because those of a rank's own
samples differ by nature.
"""

import json
import math
import os
import re
import runpy
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from heterog.balance.balancer import Balancer
from heterog.balance.kept_files import KeptFiles, call_before
from heterog.balance.loss_probe import FixedDraws
from heterog.balance.sampler import ShareSampler
from heterog.balance.updates import with_closure
from heterog.errors import HeterogError, HeterogWarning, OwnSamplesWarning
from heterog.graph.python_state import same_draws, seed_all
from heterog.runtime.accelerators import CPU_BACKEND, device_count, is_accelerated
from heterog.user_code import where_it_failed
from heterog.workers import Terminated

SEED = 0
EPS = torch.finfo(torch.float32).eps
MOST_ELEMENTS = 2**16
"""Elements of each tensor that are kept, at equal distances."""
MOST_TURNS = 10
"""Updates of one optimizer, over those asked for, after which a rank waits no longer for those of
another one, or for batches of a balancer."""
BESIDE, BUFFER = "optimizer", "buffer"
"""First words of the names of parameters that no balancer's model has, and of buffers."""

_FROZEN = (
    "BatchNorm was left out: it normalised by running statistics here. In training it takes those "
    "of a rank's own samples, as in any data parallelism; SyncBatchNorm takes those of all."
)
_NOT_FROZEN = (
    "BatchNorm without running statistics normalises by a rank's own samples, as in any data "
    "parallelism. SyncBatchNorm, or another norm, trains as one process does."
)
_NOT_COMPILED = "torch.compile was left out: what it is to compile ran op by op here."
_WRAPPED = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_forward_module)\.")
_EPS_OF_PRODUCTS = 2.0**-10
"""Of accelerators, which may round the factors of float32 products to ten bits (TF32)."""


def least_part(eps: float) -> float:
    """Part of the norm, or of the largest element, of gradients below which one may be rounding.

    Args:
        eps: See ``Noted``.
    """
    return 2 * eps + 64 * EPS


class Task(NamedTuple):
    """What a rank is to do.

    Attributes:
        folder: Folder for what was noted.
        shares: Shares in which batches are dealt.
        num_updates: Updates of each optimizer.
        is_module: Whether the script is the name of a module.
        again: Whether this run shows what else than the division makes a difference: it has other
            random numbers, and another order of each rank's samples.
        began_s: Time before which files count as the user's.
    """

    folder: str
    shares: Sequence[int]
    num_updates: int
    is_module: bool
    again: bool
    began_s: float


class Noted(NamedTuple):
    """What a rank has noted; tensors by name, cut to ``MOST_ELEMENTS``.

    Attributes:
        updates: Gradients that each update saw.
        before: Parameters before the first update, and buffers on rank 0.
        after: The same after the last update.
        deals: Samples of each rank in each step.
        eps: Relative rounding error of the coarsest numbers computed with; 0 for 32 bits and more.
        notes: Warnings of the balancer, and what was left out.
        doubts: Those of the warnings by which ranks take something from their own samples.
        files: Files that the script has made.
    """

    updates: list[dict[str, Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    deals: list[tuple[int, ...]]
    eps: float
    notes: list[str]
    doubts: list[str]
    files: list[str]


class Watch:
    """Follows the script of this rank."""

    def __init__(self, task: Task) -> None:
        self._task, self._folder = task, Path(task.folder)
        self._rank = int(os.environ["RANK"])
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._num_updates: Counter[int] = Counter()  # by the optimizers' identities
        self._has_begun = False
        self._draws = Draws()
        self._noted = Noted([], {}, {}, [], 0.0, [], [], [])
        self._files = KeptFiles(task.began_s)

    def begin(self, *_: Any) -> None:
        """Called when a loop begins to take batches: models have their first weights."""
        if self._has_begun:
            return
        self._has_begun = True
        self._num_updates.clear()
        self._note_state(self._noted.before)
        seed_all(SEED + self._task.again)
        self._draws.__enter__()  # type: ignore[no-untyped-call]

    def watch(self) -> None:
        """Follow balancers, optimizers, random numbers and files."""
        ShareSampler.dealt_as = tuple(self._task.shares)
        call_before(ShareSampler, "__iter__", self.begin)
        call_before(Balancer, "watch_norms", lambda _, model: self._models.append(model))
        call_before(
            Balancer, "begin_step", lambda _, deal, *__: self._noted.deals.append(deal.samples)
        )
        call_before(Optimizer, "__init__", lambda each, *_, **__: self._optimizers.append(each))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        # Made for each warning, also for those that a script's filters hide.
        call_before(HeterogWarning, "__init__", self._note_warning)
        self._freeze_norms()
        _draw_by_sample(self._draws, is_reversed=self._task.again)
        self._leave_uncompiled()
        self._files.watch()
        for name in ("spawn", "start_processes"):
            call_before(torch.multiprocessing, name, _refuse_to_start)
        seed_all(SEED)

    def end(self) -> None:
        """Write what was noted, and end this process when all ranks have."""
        if self._has_begun:
            self._draws.is_off = True
            self._note_state(self._noted.after)
        noted = self._noted._replace(
            eps=self._draws.eps,
            notes=[*dict.fromkeys(self._noted.notes)],
            doubts=[*dict.fromkeys(self._noted.doubts)],
            files=[str(each) for each in self._files.made if each.is_file()],
        )
        torch.save(tuple(noted), self._folder / f"{self._rank}.pt")
        if dist.is_initialized():
            dist.barrier()
        _leave(0)

    def fail(self, text: str = "", trace: str = "") -> None:
        """Write why the script has failed, if that is more than it has printed, and end."""
        (self._folder / f"{self._rank}.error").write_text(json.dumps([text, trace]))
        _leave(1)

    def _before_step(self, optimizer: Optimizer, arguments: Any, options: Any) -> Any:
        if all(each is not optimizer for each in self._optimizers):  # a copy of another one
            self._optimizers.append(optimizer)
        if not self._has_begun:
            return None
        is_noted = False

        def noting(closure: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                nonlocal is_noted
                value = closure(*given, **named)
                if not is_noted:
                    self._note_gradients(optimizer)
                is_noted = True
                return value

            return call

        changed = with_closure(arguments, options, noting)
        if changed is None:
            self._note_gradients(optimizer)
        return changed

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        counts, asked = self._num_updates, self._task.num_updates
        counts[id(optimizer)] += 1
        all_have = all(counts[id(each)] >= asked for each in self._optimizers)
        if counts[id(optimizer)] >= MOST_TURNS * asked or (self._has_begun and all_have):
            self.end()

    def _note_gradients(self, optimizer: Optimizer) -> None:
        """Note gradients; then set elements to 0 that are rounding, before Adam scales them."""
        self._note_state(self._noted.before)  # of parameters that were not there when it began
        known = self._parameters()
        found = {known[id(each)][0]: each.grad for each in _of(optimizer) if each.grad is not None}
        self._noted.updates.append({name: _part_of(each) for name, each in found.items()})
        dense = {
            name: _local(each) for name, each in found.items() if each.layout == torch.strided
        }
        sizes = [  # alike on all ranks, which average these gradients
            float(each.abs().max())
            for name, each in dense.items()
            if each.numel() and not name.startswith(BESIDE)
        ]
        least = least_part(self._draws.eps) * max(sizes, default=0.0)
        for each in dense.values() if math.isfinite(least) else ():
            each.masked_fill_(each.abs() <= least, 0.0)

    def _note_state(self, noted: dict[str, Tensor]) -> None:
        values = [*self._parameters().values()]
        for model in self._models if self._rank == 0 else ():
            values += [
                (f"{BUFFER} {_WRAPPED.sub('', name)}", each)
                for name, each in model.named_buffers()
            ]
        for name, value in values:
            is_number = value.is_floating_point() or value.is_complex()
            if name not in noted and is_number and not (value.is_meta or is_lazy(value)):
                noted[name] = _part_of(value)

    def _parameters(self) -> dict[int, tuple[str, Tensor]]:
        """Each parameter and its name, by identity; a name of a model comes first."""
        found: list[tuple[str, Tensor]] = []
        for place, model in enumerate(self._models):
            more = f" (model {place})" if place else ""
            found += [
                (_WRAPPED.sub("", name) + more, each) for name, each in model.named_parameters()
            ]
        for place, optimizer in enumerate(self._optimizers):
            found += [
                (f"{BESIDE} {place}, parameter {index} {tuple(each.shape)}", each)
                for index, each in enumerate(_of(optimizer))
            ]
        return {id(each): (name, each) for name, each in reversed(found)}

    def _note_warning(self, warning: HeterogWarning, text: str) -> None:
        is_doubt = isinstance(warning, OwnSamplesWarning)
        noted = self._noted.doubts if is_doubt else self._noted.notes
        noted.append(f"The balancer warned: {text}")

    def _leave_uncompiled(self) -> None:
        """Let torch.compile give back what it is given: no graph has fixed random draws."""

        def compile(model: Any = None, *_: Any, **__: Any) -> Any:
            self._noted.notes.append(_NOT_COMPILED)
            return (lambda own: own) if model is None else model

        torch.compile = compile

    def _freeze_norms(self) -> None:
        own = functional.batch_norm

        def batch_norm(
            input: Tensor,
            running_mean: Tensor | None,
            running_var: Tensor | None,
            weight: Tensor | None = None,
            bias: Tensor | None = None,
            training: bool = False,
            *others: Any,
            **named: Any,
        ) -> Tensor:
            if training:
                self._noted.notes.append(_NOT_FROZEN if running_mean is None else _FROZEN)
            is_left = training and running_mean is None
            given = (input, running_mean, running_var, weight, bias, is_left)
            return own(*given, *others, **named)

        functional.batch_norm = batch_norm


class Draws(FixedDraws):  # type: ignore[no-untyped-call]
    """Replaces random draws in the script, and notes how coarse numbers are.

    Attributes:
        eps: See ``Noted``.
        is_off: Whether draws are left as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps, self.is_off = 0.0, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or draw in its place."""
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]  # PyTorch gives a mode the number that a tensor of autograd wraps
        if self.is_off:
            return func(*args, **(kwargs or {}))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(made, Tensor) and made.dtype.is_floating_point:
            if made.dtype.itemsize < 4:
                self.eps = max(self.eps, torch.finfo(made.dtype).eps)
            elif is_accelerated(made):
                self.eps = max(self.eps, _EPS_OF_PRODUCTS)
        return made


def _draw_by_sample(draws: Draws, *, is_reversed: bool) -> None:
    """Let each sample of a data set draw from a seed of its own, in this process and workers."""

    def fetch(fetcher: Any, indices: Any) -> Any:
        is_list = fetcher.auto_collation
        data = []
        for index in (indices[::-1] if is_reversed else indices) if is_list else [indices]:
            before, draws.is_off = draws.is_off, True
            try:
                with same_draws():
                    seed_all(zlib.crc32(repr(index).encode()))
                    data.append(fetcher.dataset[index])
            finally:
                draws.is_off = before
        return fetcher.collate_fn(data if is_list else data[0])

    _MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]


def _of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _local(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _part_of(value: Tensor) -> Tensor:
    """Elements of a tensor, or of this rank's part of it, on the CPU."""
    value = _local(value)
    value = value if value.layout == torch.strided else value.to_dense()
    value = torch.view_as_real(value) if value.is_complex() else value
    flat = value.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))].to("cpu", copy=True)


def _refuse_to_start(*_: Any, **__: Any) -> None:
    raise HeterogError(
        "the script starts its ranks itself, and a check starts them as torchrun does: let it "
        "take RANK and WORLD_SIZE from the environment."
    )


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_environment() -> None:
    """The variables that torchrun would set, and one accelerator for several ranks if need be."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), GROUP_RANK="0", NODE_RANK="0")
    os.environ.setdefault("WANDB_MODE", "disabled")
    number = device_count()
    os.environ["LOCAL_RANK"] = str(rank % number if 0 < number < num_ranks else rank)
    if 0 < number < num_ranks:
        begin = dist.init_process_group

        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("device_id", None)
            begin(CPU_BACKEND, *args, **kwargs)

        dist.init_process_group = init_process_group


def main() -> None:
    """Run the script of the command line."""
    given, script, *arguments = sys.argv[1:]
    task = Task(**json.loads(given))
    set_environment()
    watch = Watch(task)
    watch.watch()
    sys.argv = [script, *arguments]
    try:
        if task.is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except Terminated:  # by a signal, while the script runs ranks or a testbed of its own
        raise
    except SystemExit as end:
        if end.code:
            print("" if isinstance(end.code, int) else end.code, file=sys.stderr)
            watch.fail()
    except Exception as error:
        watch.fail(where_it_failed(Path(script), error), traceback.format_exc())
    watch.end()


if __name__ == "__main__":
    main()
