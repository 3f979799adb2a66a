"""New parameters: the user's optimizer makes them here, servers send them to the other ranks.

``make_optimizer`` makes the optimizer of a rank's tensors, with all parameter groups. ``Updates``
may delay the update of a whole parameter: it runs at the parameter's first read, or at the end of
the step, together with other waiting updates. Without a step barrier it runs in the next step, and
still uses the learning rate at the call of its own step. A slice is stepped at its turn, because
then its gradients, which were sent on, are freed: this is the memory that ZeRO is chosen for.

``Masters`` are copies in higher precision that the optimizer updates. In the model's dtype,
updates smaller than half the distance of two numbers would be lost, one step after the other. So
the model gets the copy rounded after every step (Micikevicius et al. 2018, section 3.1).

``LossScale`` keeps gradients in float16 from vanishing. Cards without bfloat16 (V100, T4, RTX 20)
train in float16, whose smallest normal number is 6e-5: smaller gradients lose digits and then
become 0. So the backward pass begins with the scale instead of 1, and gradients are divided by it
before they are clipped and used (Micikevicius et al., "Mixed Precision Training", ICLR 2018,
section 3.2). The scale follows the rules of ``torch.amp.GradScaler``.

``keep_state_in`` stores optimizer state in lower precision than it is computed in. Adam's two
moments are twice as large as the parameters; in bfloat16 they take half of that. They are widened
to the dtype of the stepped tensor before a step, and rounded after it. The step itself loses
nothing (as with Megatron-LM's ``exp-avg-dtype``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph
from heterog.graph.optimizer_probe import ParameterGroup
from heterog.graph.step import CountedOptions, StepOptions
from heterog.graph.workload import Workload
from heterog.lowering.resident import STEPPED_BYTES, STEPPED_BYTES_CPU
from heterog.runtime.accelerators import CPU
from heterog.runtime.step.collectives import Pending
from heterog.runtime.step.gradients import Gradients, decoded
from heterog.runtime.step.pieces import pieces_of
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recorder import Recorder


def keep_state_in(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Let an optimizer keep its state in another dtype between steps.

    Counters stay as they are, and so does all state if ``dtype`` is ``None``.

    Args:
        optimizer: An optimizer; its tensors have the precision of ``dtype`` or a higher one.
        dtype: Dtype of its state.
    """
    if dtype is None:
        return

    def narrow(stepper: torch.optim.Optimizer, *_: object) -> None:
        _convert(stepper, dtype)

    optimizer.register_step_pre_hook(lambda stepper, *_: _convert(stepper, None))
    optimizer.register_step_post_hook(narrow)
    optimizer.register_load_state_dict_post_hook(narrow)


def _convert(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> None:
    """Convert the state of all stepped tensors to a dtype, or to their own if ``None``."""
    for group in optimizer.param_groups:
        for stepped in group["params"]:
            state = optimizer.state.get(stepped, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                    state[key] = value.to(dtype or stepped.dtype)


@dataclass(slots=True, kw_only=True)
class LossScale:
    """A scale that grows while gradients are finite and shrinks when they are not.

    A step with gradients that are not finite changes no parameter and no state of the optimizer.
    Every rank has a ``LossScale`` of its own, and all of them change alike.

    Attributes:
        scale: Factor of the loss in the next step; the default is torch's.
        growth_factor: Factor of the scale after ``growth_interval`` good steps in a row.
        backoff_factor: Factor of the scale after a step whose gradients are not finite.
        growth_interval: Number of good steps in a row after which the scale grows.
        good_steps: Good steps in a row since the scale has changed.
        num_skipped: Steps so far that changed nothing.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    num_skipped: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 2.0**100:
            raise HeterogError(f"a loss scale of {self.scale}; it must be above 0.")
        if self.growth_factor <= 1.0 or not 0.0 < self.backoff_factor < 1.0:
            raise HeterogError(
                f"a loss scale with growth_factor {self.growth_factor} and backoff_factor "
                f"{self.backoff_factor}; the first must be above 1, the second between 0 and 1."
            )
        if self.growth_interval < 1:
            raise HeterogError(f"growth_interval is {self.growth_interval}; it must be 1 or more.")

    def update(self, *, is_finite: bool) -> None:
        """Adapt the scale to whether all gradients of a step were finite."""
        if not is_finite:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            self.num_skipped += 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Numbers to keep in a checkpoint, as its ``extra``."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from numbers of ``state_dict``."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])


def op_that_begins_backward(graph: OpGraph) -> int | None:
    """The op that makes the gradient of the loss with respect to itself, a 1; or ``None``."""
    loss = int(graph.storage[graph.loss])
    return next(
        (
            index
            for index, op in enumerate(graph.ops)
            if op.kind == "ones_like.default" and int(graph.storage[op.inputs[0]]) == loss
        ),
        None,
    )


class Masters:
    """The optimizer's copies of the parameters and slices that it updates.

    Args:
        dtype: Dtype of the copies; ``None`` makes none, and the values themselves are updated.
        values: Parameters and slices to update; values that have the dtype need no copy.

    Attributes:
        stepped: Tensors of the optimizer, in the order of the values.
    """

    def __init__(self, dtype: torch.dtype | None, values: Sequence[nn.Parameter]) -> None:
        self._values: dict[int, nn.Parameter] = {}  # by id of the copy
        self._copies: dict[int, nn.Parameter] = {}  # by id of the value
        self.stepped = [self._add(dtype, value) for value in values]

    def _add(self, dtype: torch.dtype | None, value: nn.Parameter) -> nn.Parameter:
        if dtype is None or value.dtype == dtype or not value.is_floating_point():
            return value
        copy = nn.Parameter(value.detach().to(dtype))
        vars(copy).update(vars(value))  # attributes, which optimizers may read
        self._copies[id(value)], self._values[id(copy)] = copy, value
        return copy

    def of(self, value: nn.Parameter) -> nn.Parameter:
        """The optimizer's copy of a value, or the value itself if it has none."""
        return self._copies.get(id(value), value)

    def value_of(self, stepped: nn.Parameter) -> nn.Parameter:
        """The model's value of one of the optimizer's tensors."""
        return self._values.get(id(stepped), stepped)

    def write_back(self, values: Iterable[nn.Parameter]) -> None:
        """Round the copies of some values and store them in the values."""
        with torch.no_grad():
            for value in values:
                if id(value) in self._copies:
                    value.copy_(self._copies[id(value)])


_NORM_EPSILON = 1e-6
"""Same value as in ``torch.nn.utils.clip_grad_norm_``."""


def in_parts(rows: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut rows, in order, into parts of at most ``most`` bytes; a larger row is a part alone.

    >>> in_parts([4, 5, 6, 7], [10, 30, 50, 10], 40)
    [[4, 5], [6], [7]]
    """
    parts: list[list[int]] = [[]]
    filled = 0
    for row, size in zip(rows, sizes, strict=True):
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(row)
        filled += size
    return parts


@dataclass(slots=True)
class StepUpdates:
    """State of the updates of one step.

    Attributes:
        gradients: Gradients of the step.
        options: Options of the optimizer for this step.
        scale: Factor of every gradient, for clipping or where islands average; ``None`` leaves
            them as they are.
        loss_scale: Factor of the loss, and so of all gradients as they were made.
        is_skipped: Whether the step changes nothing, because its gradients are not finite.
        updated: Number of parameters that may be updated, by bucket that is updated in slices.
    """

    gradients: Gradients
    options: StepOptions
    scale: Tensor | None = None
    loss_scale: float = 1.0
    is_skipped: bool = False
    updated: dict[int, int] = field(default_factory=dict)


class Updates:
    """Brings this rank's parameters up to date.

    Args:
        rank: What the rank runs the program with.

    Attributes:
        recorder: Recorder notified of every call of the optimizer, if set.
        norm: Norm of the gradients in the last step that was clipped.
    """

    def __init__(self, rank: RankState) -> None:
        self.recorder: Recorder | None = None
        self.norm: Tensor | None = None
        part = self._part = rank.part
        self._rank = rank
        self._parameters = rank.parameters
        self._options = CountedOptions(rank.optimizer)
        self._communicator = rank.communicator
        is_on_cpu = rank.device.type == CPU.type
        self._most_bytes = STEPPED_BYTES_CPU if is_on_cpu else STEPPED_BYTES
        self._owned = [
            row
            for row in range(len(part.graph.updates))
            if part.rank in part.owners(row) and not part.zero_stage(row)
        ]
        self._step: StepUpdates | None = None  # the step of all waiting parameters
        self._waiting: dict[int, int] = {}  # row by tensor id
        self._arriving: dict[int, Pending] = {}  # by tensor id
        self._gathering: dict[int, Pending] = {}  # by bucket
        self._messages: dict[int, Tensor] = {}  # of parameters, by the transfer

    def options(self) -> StepOptions:
        """The optimizer's options for a step that is called now."""
        return StepOptions(self._options.now())

    def read(self, tensor: int) -> nn.Parameter:
        """A parameter, with all pending updates done."""
        if tensor in self._arriving:
            self._arriving.pop(tensor).wait()
        if tensor in self._waiting:
            self.step()
        if self._gathering:
            bucket = self._part.sliced_of_tensor.get(tensor)
            if bucket is not None and bucket.number in self._gathering:
                self._gathering.pop(bucket.number).wait()
        return self._parameters[tensor]

    def gather(self, bucket: int) -> None:
        """Send a bucket's new slices to all devices that keep its parameters whole."""
        sliced = self._part.sliced[bucket]
        self._gathering[bucket] = self._communicator.all_gather_slices(
            self._rank.slices.whole[bucket], sliced.devices, sliced.counts
        )

    def update(self, row: int, step: StepUpdates) -> None:
        """Allow the update of a parameter, or of this rank's slice of it, from now on."""
        bucket = self._part.sliced_bucket(row)
        if bucket is None:
            assert not self._waiting or self._step is step
            self._step = step
            self._waiting[self._part.graph.updates[row][1]] = row
            return
        # A slice has parts of several parameters, and all of them must be free to change.
        step.updated[bucket.number] = step.updated.get(bucket.number, 0) + 1
        if step.updated[bucket.number] == len(bucket.rows):
            total = step.gradients.slice_total(bucket.number)
            runs = self._rank.slices.runs[bucket.number]
            targets = [(run.value, total[run.begin : run.end]) for run in runs]
            self._apply(step, targets, bucket.rows)
            del total, targets
            step.gradients.let_go_slice(bucket)

    def pull(self, task: int, row: int) -> None:
        """Send a new parameter to a replica, or receive it."""
        src, dst = self._part.channel(task).devices
        tensor = self._part.graph.updates[row][1]
        codec = self._part.program.codec_of(task)
        if self._part.rank == src:
            value = self.read(tensor).detach()
            self._communicator.send(
                value if codec is None else self._messages.pop(task), dst, task
            )
            return
        like = self.read(tensor).detach()  # waits for an earlier receive that no op has read
        self._arriving[tensor] = decoded(self._communicator, like, src, task, codec)

    def encode(self, task: int, row: int) -> None:
        """Encode a new parameter that a replica pulls."""
        codec = self._part.rule(task).codec
        value = self.read(self._part.graph.updates[row][1]).detach()
        self._messages[self._part.message_of[task]] = codec.encode(value)

    def decode(self, row: int) -> None:
        """Decode a pulled parameter's message, unless a reader of the parameter already has."""
        arriving = self._arriving.pop(self._part.graph.updates[row][1], None)
        if arriving is not None:
            arriving.wait()

    def finish(self) -> None:
        """Run the remaining updates; wait for all parameters and for all sends."""
        self.step()
        self.wait_for_issued()
        self._communicator.flush()

    def wait_for_issued(self) -> None:
        """Wait for the parameters that are being received."""
        for pending in (*self._arriving.values(), *self._gathering.values()):
            pending.wait()
        self._arriving.clear()
        self._gathering.clear()

    def clip(
        self, step: StepUpdates, max_norm: float | None, loss_scale: LossScale | None = None
    ) -> None:
        """Compute the factor that scales the gradients down to a norm over all parameters.

        The formula, and what happens to a norm that is not finite, are those of
        ``torch.nn.utils.clip_grad_norm_``: scale = min(1, max_norm / (norm + 1e-6)). Each
        parameter's total gradient counts once, on the rank that owns it, and so does each slice.

        Args:
            step: The step that the gradients belong to.
            max_norm: Largest norm; ``None`` leaves the norm as it is.
            loss_scale: Scale of the loss; gradients are divided by it first, and a step whose norm
                is not finite is skipped.
        """
        # In double precision: squares of large norms overflow where the norms do not.
        squares = torch.zeros((), dtype=torch.float64, device=self._rank.device)
        gradients, slices = step.gradients, self._rank.slices
        parts = [gradients.total(row) for row in self._owned]
        parts += [
            gradients.slice_total(number)
            for number, own in slices.own.items()
            if own.numel() and slices.buckets[number].is_first
        ]
        norms = [
            # The norm of small float16 numbers may itself be too large for float16.
            torch.linalg.vector_norm(
                part, dtype=torch.float32 if part.dtype == torch.float16 else None
            )
            for part in parts
        ]
        if norms:
            squares += torch.stack([norm.double() for norm in norms]).square().sum()
        squares = self._communicator.sum_over_all(squares).wait()
        self.norm = squares.sqrt() / step.loss_scale
        step.scale = torch.ones_like(self.norm)
        if max_norm is not None:
            step.scale = (max_norm / (self.norm + _NORM_EPSILON)).clamp(max=1.0)
        step.scale = step.scale / step.loss_scale
        if loss_scale is not None:
            step.is_skipped = not bool(self.norm.isfinite())
            loss_scale.update(is_finite=not step.is_skipped)

    def step(self) -> None:
        """Update the waiting whole parameters, in as few calls as possible."""
        if not self._waiting:
            return
        assert self._step is not None
        step, waiting = self._step, self._waiting
        self._step, self._waiting = None, {}
        gradients = step.gradients
        rows = list(waiting.values())
        for part in self._stepped_together(rows):
            tensors = [self._part.graph.updates[row][1] for row in part]
            targets = [
                (self._parameters[tensor], gradients.total(row))
                for tensor, row in zip(tensors, part, strict=True)
            ]
            self._apply(step, targets, part)
            for row in part:
                gradients.let_go(row)

    def _stepped_together(self, rows: list[int]) -> list[list[int]]:
        """Rows in parts that the optimizer steps in one call each.

        An optimizer may make copies of all that it steps in one call, gradients are converted to
        the dtype that it steps in, and its state may be widened for the step. In parts, all that
        takes little memory beside the gradients. The results are the same if the optimizer steps
        parameters independently of each other.
        """
        graph = self._part.graph
        if self._rank.push is not None or not graph.updates_elementwise:
            return [rows]
        masters = self._rank.masters
        sizes = [masters.of(self._parameters[graph.updates[row][1]]).nbytes for row in rows]
        return in_parts(rows, sizes, self._most_bytes)

    def _apply(
        self, step: StepUpdates, targets: list[tuple[nn.Parameter, Tensor]], rows: Sequence[int]
    ) -> None:
        """Call the optimizer for parameters, or slices, with their gradients.

        Args:
            step: The step that the gradients belong to.
            targets: Parameters or slices, each with the sum of its gradients.
            rows: Rows of ``graph.updates`` that are updated.
        """
        if self._rank.push is not None:
            self._rank.push(rows, [total for _, total in targets])
            return
        if step.is_skipped:
            return
        if self.recorder is not None:
            self.recorder.begin_update(rows)
        together = []
        for parameter, total in targets:
            whole = self._rank.masters.of(parameter)
            if self._part.graph.is_stepped_in_pieces and whole.nbytes > self._most_bytes:
                for piece, place in pieces_of(self._rank.optimizer, whole, self._most_bytes):
                    self._call(step, [(piece, total[place])])
            else:
                together.append((whole, total))
        if together:  # none on a rank whose slice is empty
            self._call(step, together)
        self._rank.masters.write_back(parameter for parameter, _ in targets)
        if self.recorder is not None:
            self.recorder.end_update(rows)

    def _call(self, step: StepUpdates, pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Call the optimizer once, for tensors with the sums of their gradients."""
        optimizer = self._rank.optimizer
        for stepped, total in pairs:
            # The factor has the wider dtype, because 1/65536 has few digits in float16.
            gradient = lying_like(stepped, total)
            scale = step.scale
            if scale is not None:
                gradient = gradient.to(torch.promote_types(gradient.dtype, stepped.dtype))
                gradient = gradient * scale.to(gradient.dtype)
            stepped.grad = gradient.to(stepped.dtype)
        memory = [(stepped, stepped.detach()) for stepped, _ in pairs]
        with _only_with_gradients(optimizer), self._options.of(step.options):
            optimizer.step()
        for stepped, own in memory:
            stepped.grad = None
            if stepped.data_ptr() != own.data_ptr():  # param.data = ..., and others read a view
                own.copy_(stepped.detach())
                stepped.data = own


def lying_like(stepped: Tensor, total: Tensor) -> Tensor:
    """A gradient whose elements lie as those of the stepped tensor do.

    Fused optimizers of a CPU match elements by their places in memory.
    """
    are_contiguous = stepped.is_contiguous() and total.is_contiguous()
    if are_contiguous or total.stride() == stepped.stride():
        return total
    return torch.empty_like(stepped, dtype=total.dtype).copy_(total)


@contextmanager
def _only_with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide parameters without a gradient from the optimizer, which looks at each of them.

    A step may call it once per served parameter.
    """
    every = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [value for value in group["params"] if value.grad is not None]
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, every, strict=True):
            group["params"] = values


def make_optimizer(
    workload: Workload,
    groups: Sequence[ParameterGroup],
    stepped: Sequence[nn.Parameter],
    group_of: Sequence[int],
) -> torch.optim.Optimizer:
    """Make the user's optimizer of some tensors.

    It has all groups on every rank, empty ones included, so that all ranks can make the same
    scheduler.

    Args:
        workload: The workload.
        groups: Its parameter groups.
        stepped: Tensors that the optimizer steps.
        group_of: Number of the group of each of them.
    """
    members: list[list[nn.Parameter]] = [[] for _ in groups]
    for value, group in zip(stepped, group_of, strict=True):
        members[group].append(value)
    optimizer = workload.optimizer(
        [{**group.options, "params": own} for group, own in zip(groups, members, strict=True)],
        **dict(workload.optimizer_options),
    )
    keep_state_in(optimizer, workload.state_dtype)
    return optimizer
