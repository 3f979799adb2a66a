"""One training step of a workload as a function of parameters, buffers and batch.

``Step`` is called once to be traced, and again on fake tensors to check that it computes the same.

``CountedOptions`` makes all calls of an optimizer in one step count as one. Ranks may step some
parameters, or slices of them, in separate calls, and optimizers may count their calls in the
options of a group. So every call of a step begins with the options of the step's first call.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from heterog.errors import CaptureError
from heterog.graph.value_numbers import Results, ValueNumbers, storage_of
from heterog.graph.workload import Workload
from heterog.local_losses import LocalBlocks

Options = list[dict[str, Any]]
"""Options of each of the optimizer's parameter groups, without its parameters."""


@dataclass(slots=True)
class StepOptions:
    """Options of one step.

    Attributes:
        called: Options when the step was called; users may have changed them since.
        begun: Options when its first call began; ``None`` before that.
    """

    called: Options
    begun: Options | None = None


class CountedOptions:
    """Gives an optimizer the options of the step that it is called for.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counted: set[str] = set()  # options that the optimizer itself changes

    def now(self) -> Options:
        """The options as they are now."""
        return [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    @contextmanager
    def of(self, step: StepOptions) -> Iterator[None]:
        """Give the optimizer a step's options while it is called in the body."""
        if step.begun is None:
            with self._first_call(step):
                yield
            return
        groups = self._optimizer.param_groups
        own = [dict(group) for group in groups]
        for group, begun in zip(groups, step.begun, strict=True):
            _put(group, {key: _kept(value) for key, value in begun.items()})
        try:
            yield
            for group, begun, mine in zip(groups, step.begun, own, strict=True):
                for key in _changed(begun, group):
                    if key not in _changed(begun, mine):  # no call of this step has changed it
                        mine[key] = group[key]
        finally:
            for group, mine in zip(groups, own, strict=True):
                _put(group, mine)

    @contextmanager
    def _first_call(self, step: StepOptions) -> Iterator[None]:
        groups = self._optimizer.param_groups
        users = [
            _changed(group, called) - self._counted
            for group, called in zip(groups, step.called, strict=True)
        ]
        own = [
            {key: group[key] for key in each} for group, each in zip(groups, users, strict=True)
        ]
        for group, called, each in zip(groups, step.called, users, strict=True):
            group.update({key: called[key] for key in each})
        step.begun = self.now()
        try:
            yield
            for group, begun in zip(groups, step.begun, strict=True):
                self._counted |= _changed(begun, group)
        finally:
            for group, mine in zip(groups, own, strict=True):
                group.update({key: mine[key] for key in mine.keys() - self._counted})


def _changed(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    """Options that have changed, or are new."""
    return {
        key
        for key, value in now.items()
        if key != "params" and (key not in before or _differ(before[key], value))
    }


def _put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Replace all options of a group, but keep its parameters."""
    options = {**options, "params": group["params"]}
    group.clear()
    group.update(options)


def _kept(value: Any) -> Any:
    """A copy of an option that no optimizer can change in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is not other and not torch.equal(one, other)
    return one is not other and bool(one != other)


logger = logging.getLogger(__name__)

_set_versions = torch._C._autograd._unsafe_set_version_counter
OFTEN = 720_720_000
"""Number of calls that is a multiple of every n up to 16, and of tens, hundreds and thousands, so
that a change at every n-th call happens at it; all warm-ups have ended before."""


Inputs = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Any]
"""Parameters and buffers of a step by name, and its batch."""


class Step:
    """A forward and a backward pass of a workload, with the values that they compute.

    Attributes:
        numbers: Values of its tensors in all calls.
        results: Values that its last call has computed; ``None`` if the call has failed.
        refusal: Error that says why its last call cannot be a step of a plan.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        inputs: Inputs,
        where: Callable[[], str],
        known: Mapping[str, Tensor],
    ) -> None:
        self._workload, self._model = workload, model
        self._inputs = inputs
        self.results: Results | None = None
        self.refusal: CaptureError | None = None
        self._known = known
        self.numbers = ValueNumbers(where, known)

    def traced(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """The loss, the gradients and the new values of the buffers.

        Only the forward pass is numbered: a mode would change how the backward pass is traced.
        """
        loss, gradients = self._run(parameters, buffers, batch, backward=True)
        _check_dense(self._workload, dict(zip(parameters, gradients, strict=True)))
        wanted = [_as_added_up(self._workload, gradient) for gradient in gradients]
        return loss.detach(), wanted, list(buffers.values())

    @contextmanager
    def of_later(self) -> Iterator[None]:
        """Raise the version counters of parameters in the body, as after many steps."""
        parameters = tuple(self._inputs[0].values())
        versions = tuple(each._version for each in parameters)
        _set_versions(parameters, tuple(each + OFTEN for each in versions))
        try:
            yield
        finally:
            _set_versions(parameters, versions)

    def call(self, backward: bool) -> Results | None:
        """Call the step without a trace, with its backward pass or without.

        Returns:
            The values that it computes; ``None`` if it fails.
        """
        parameters, buffers, batch = self._inputs
        self.results = self.refusal = None
        try:
            self._run(dict(parameters), dict(buffers), batch, backward=backward, is_traced=False)
        except CaptureError as error:
            self.refusal = error
        except Exception:
            logger.debug("a further call of the step fails", exc_info=True)
        return self.results

    def _run(
        self,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: Any,
        *,
        backward: bool,
        is_traced: bool = True,
    ) -> tuple[Tensor, list[Tensor | None]]:
        for parameter in parameters.values():
            parameter.grad = None  # of an earlier step
        state, gradients = {**parameters, **buffers}, list[Tensor | None]()
        # The backward pass is inside, too: functions of the user's own may read the model there.
        with (
            stateless._reparametrize_module(self._model, state, tie_weights=True),
            self.numbers.seeds.watched(),
        ):
            trained = [each.requires_grad for each in state.values()]
            num_hooks = {name: _num_hooks(each) for name, each in parameters.items()}
            memory = [storage_of(each) for each in state.values()]
            with self.numbers.run(_named_inputs(state, batch)):
                loss = self._workload.step_loss(self._model, batch)
            if self.numbers.unanswered is not None:
                raise self.numbers.unanswered
            self._check_known(state)
            self._check_seeds("forward")
            check_hooks(self._workload, parameters)
            if not is_traced:  # a hook that the first call registers stays, as in training
                self._check_number_of_hooks(parameters, num_hooks)
            self._check_switches({**parameters, **buffers}, trained)
            replaced = self._replaced(state, memory)
            root = _root_of(self._workload, loss)
            results = self.numbers.results(loss, *replaced.values())
            if backward:
                setup_stacktrace_preservation_hooks([root])
                with nullcontext() if is_traced else self.numbers.numbering():
                    gradients = self._gradients(loss, parameters)
                self._check_seeds("backward")
            if backward and not is_traced:
                results += self.numbers.results(*gradients)
            self.results = results
        if is_traced and replaced:
            with torch.no_grad():  # after the backward pass, which may read the old values
                for name, value in replaced.items():
                    buffers[name].copy_(value)
        return loss, gradients

    def _check_known(self, state: Mapping[str, Tensor]) -> None:
        """Refuse a step that writes a buffer whose value decides what it computes."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name in self._known:
            if now.get(name) is not state[name] or self.numbers.is_written(state[name]):
                raise CaptureError(
                    f"workload '{self._workload.name}': the step asks for the value of buffer "
                    f"'{name}', and changes it, so that later steps compute something else. If "
                    "only the first one does (it initialises by its data), call the model on a "
                    "batch in the function that makes it; if the buffer counts steps (torch's "
                    "AveragedModel), keep averages by average.lerp_(weight.detach(), 0.01)."
                )

    def _check_seeds(self, which: str) -> None:
        """Refuse a pass that sets the state of random numbers."""
        if place := self.numbers.seeds.look(lambda: f"the end of its {which} pass"):
            raise CaptureError(
                f"workload '{self._workload.name}': the step sets the state of torch's random "
                "numbers (torch.manual_seed, torch.seed, set_rng_state, or fork_rng around "
                f"draws), seen at {place}. Ranks of a plan draw numbers of their own for each op "
                "and step. Leave it out: numbers that all steps share belong in a buffer that "
                "__init__ draws, those that are used twice are drawn once, and others can be a "
                "tensor of the batch."
            )

    def _check_number_of_hooks(
        self, parameters: Mapping[str, Tensor], before: Mapping[str, int]
    ) -> None:
        """Refuse a forward pass that registers further hooks of parameters at each call."""
        for name, each in parameters.items():
            if _num_hooks(each) > before[name]:
                raise CaptureError(
                    f"workload '{self._workload.name}': each forward pass registers one more hook "
                    f"of '{name}', so that every step changes its gradient otherwise. Register "
                    "it once, in __init__, or remove it at the end (handle.remove())."
                )

    def _check_switches(self, given: Mapping[str, Tensor], trained: Sequence[bool]) -> None:
        """Refuse a forward pass that freezes parameters, or trains what was frozen."""
        for (name, each), before in zip(given.items(), trained, strict=True):
            if each.is_leaf and each.requires_grad != before:
                raise CaptureError(
                    f"workload '{self._workload.name}': the forward pass sets requires_grad of "
                    f"'{name}' to {each.requires_grad}, and all steps of a plan train the same "
                    "parameters. Make the model with those that are to be trained; when others "
                    "are, save a checkpoint, plan again and load it."
                )

    def _replaced(self, state: Mapping[str, Tensor], memory: Sequence[int]) -> dict[str, Tensor]:
        """Tensors that the forward pass has assigned to buffers, by name, without constants."""
        model = self._model
        now: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
        now.update(model.named_parameters(remove_duplicate=False))
        found: dict[str, Tensor] = {}
        for (name, old), storage in zip(state.items(), memory, strict=True):
            new = now.get(name)
            is_same = new is old
            if is_same and storage_of(old) == storage:
                continue
            if new is not None and not is_same and not self.numbers.of(new).varies:
                continue  # a constant table, which the next step makes again or finds
            is_like = new is not None and (new.shape, new.dtype) == (old.shape, old.dtype)
            if new is None or is_same or not is_like or old.requires_grad:
                text = "other memory (.data = ...)" if is_same else _kind_of(new)
                raise CaptureError(
                    f"workload '{self._workload.name}': the forward pass puts {text} in the place "
                    f"of '{name}' ({_kind_of(old)}), which the next step would not find. Write "
                    "to it in place and in its shape: self.name.copy_(value) for a buffer, "
                    "parameter.data.copy_(value) for a frozen parameter; choose among modules "
                    "with torch.where on their results."
                )
            found[name] = new.detach().clone() if storage_of(new) in memory else new.detach()
        return found

    def _gradients(self, loss: Tensor, parameters: dict[str, Tensor]) -> list[Tensor | None]:
        """Gradients of the loss, by parameter."""
        every = list(parameters.values())
        # Blocks with losses of their own start before the sum of all losses is known.
        has_own = isinstance(self._model, LocalBlocks)
        begin = torch.ones((), dtype=loss.dtype, device=loss.device) if has_own else None
        found = torch.autograd.grad(loss, every, begin, allow_unused=True)
        return [_with_accumulated(*each) for each in zip(every, found, strict=True)]


def check_hooks(workload: Workload, parameters: Mapping[str, Tensor]) -> None:
    """Refuse hooks that run after a gradient is in ``.grad``: a plan puts none there."""
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"workload '{workload.name}': '{name}' has a hook that runs after its gradient "
                "is accumulated, which no plan can call. Change gradients in a hook of the "
                "tensor (register_hook), and step optimizers outside of hooks."
            )


def _num_hooks(parameter: Tensor) -> int:
    return len(parameter._backward_hooks or ())


def _kind_of(value: Tensor | None) -> str:
    """A tensor in words."""
    dtype = "nothing" if value is None else str(value.dtype).removeprefix("torch.")
    return dtype if value is None else f"{dtype} of {tuple(value.shape)}"


def _named_inputs(state: Mapping[str, Tensor], batch: Any) -> dict[str, Tensor]:
    """Inputs of a step by names that no two of them share."""
    given = {f"batch {place}": each for place, each in enumerate(pytree.tree_leaves(batch))}
    return {**state, **{name: each for name, each in given.items() if isinstance(each, Tensor)}}


def _with_accumulated(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient plus what the backward pass has accumulated in the parameter's ``.grad``.

    Functions that compute their forward pass again (reversible layers) call ``backward`` on it,
    which accumulates there.
    """
    added, parameter.grad = parameter.grad, None
    if added is None or gradient is None:
        return gradient if added is None else added
    return gradient + added


def _as_added_up(workload: Workload, gradient: Tensor | None) -> Tensor | None:
    """A gradient in the dtype in which it is summed."""
    dtype = workload.reduce_dtype
    if gradient is None or dtype is None or not gradient.is_floating_point():
        return gradient
    return gradient.to(dtype)


def _root_of(workload: Workload, loss: object) -> torch.autograd.graph.Node:
    """Node at which the backward pass begins; refuses a loss that cannot be trained."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        advice = (
            "Take its mean or its sum."
            if isinstance(loss, Tensor)
            else "Return what is trained on alone, or with loss=None in a dict as 'loss'; of "
            "several losses their sum."
        )
        raise CaptureError(
            f"workload '{workload.name}': the loss must be a scalar tensor, got {shape}. {advice}"
        )
    if loss.grad_fn is None:
        raise CaptureError(
            f"workload '{workload.name}': the loss does not depend on any parameter."
        )
    return loss.grad_fn


def _check_dense(workload: Workload, gradients: Mapping[str, Tensor | None]) -> None:
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout != torch.strided:
            raise CaptureError(
                f"workload '{workload.name}': the gradient of '{name}' is sparse; leave out "
                "sparse=True where it is looked up. Modules need not be changed: their "
                "gradients are made dense."
            )
