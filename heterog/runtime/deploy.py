"""Deployment: a plan and a workload become a step that trains, on every rank."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.cluster.topology import Execution
from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.optimizer_probe import group_numbers, parameter_groups
from heterog.graph.python_state import random_states, same_draws
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import FloatArray, IntArray, TaskKind
from heterog.modes.on_ranks import RankMode
from heterog.runtime.accelerators import is_accelerated, keep_freed_memory, rank_device
from heterog.runtime.step.alike import (
    Replicas,
    Signature,
    batch_by_tensor,
    batch_shapes,
    compare,
    compare_weights,
    compared_after,
    compared_at,
    of_step,
    of_workload,
    planned_signature,
    resize,
    signature,
)
from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.compiled import Compiler
from heterog.runtime.step.deploy_checks import (
    Unchanged,
    as_planned,
    check_masters,
    check_modes,
    check_plain_entries,
    check_same_everywhere,
    check_scaled,
    check_world,
    refuse_second_step,
)
from heterog.runtime.step.executor import StepExecutor, device_sets
from heterog.runtime.step.gradients import ErrorFeedback
from heterog.runtime.step.late_ranks import LateRanks
from heterog.runtime.step.local_op import local_ops
from heterog.runtime.step.optimizer import LossScale, Masters, make_optimizer
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.rank_state import RankState
from heterog.runtime.step.recorder import Recorder, TaskTimes, gather_task_times
from heterog.runtime.step.replays import Replays
from heterog.runtime.step.slices import buffers_of
from heterog.runtime.step.special_ops import RandomStream
from heterog.runtime.step.step_order import StepOrder, step_order
from heterog.runtime.step.whole_model import (
    ModelPart,
    join_statistics,
    one_model,
    other_inputs,
    refuse_call,
    share_constants,
)
from heterog.search.plan import Plan

_LOG = logging.getLogger(__name__)

MAX_OTHER_SHAPES = 8
"""Number of further batch shapes whose programs are kept: one for the last batch of an epoch, or
a few lengths; a program of BERT-large takes tens of megabytes of host memory."""


class DeployedStep:
    """A training step on one rank: call it with the global batch, get the global loss.

    Parameters live where the plan puts them; ``state_dict`` brings them together.

    With a plan without a step barrier, a call returns the loss while gradients and new parameters
    are still in transit; the next step waits for each parameter where it is read. ``flush`` ends
    open updates. So do ``state_dict``, ``model`` and ``parameters``; every rank then has to call
    them. Call one of these before the process group is destroyed.

    Attributes:
        rank: Number of this process.
        plan: Plan that is run.
        captured: Training step as it was captured on this rank.
        part: Part of the model that this rank holds.
        groups: Parameter groups of the workload, by names.
        optimizer: Optimizer of the parameters that this rank updates. It has all groups, even
            empty ones, so that every rank can make the same scheduler. Its options may be changed
            at any time: an update uses the options at the time of its own step's call. Its state
            is up to date after ``flush``.
        loss_scale: Scale of the loss, if it is scaled.
        communicator: Communicator with the other ranks.
        compiler: Compiler of the step, where the plan's cluster says ``execution: compiled``.
        modes: This rank's part of each mode of the plan; empty in exact training.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        *,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        seed: int = 0,
        captured: CapturedStep | None = None,
    ) -> None:
        check_world(plan)
        self.rank = dist.get_rank()
        self.plan = plan
        plan.require_written()
        check_masters(plan.strategy, workload)
        self._draw_as_now = random_states()
        self.captured = as_planned(captured or capture_step(workload), plan, workload.name)
        graph = self.captured.graph
        program = lower(graph, plan.cluster, plan.strategy, num_steps=1)
        if program.hash != plan.program_hash:
            raise StrategyError(
                f"the plan's strategy lowers to program {program.hash} here, not to the plan's "
                f"{plan.program_hash}: it was made by another version of heterog; plan again."
            )
        check_same_everywhere(program.hash)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise StrategyError(f"max_grad_norm is {max_grad_norm}; it must be above 0.")
        self.loss_scale = loss_scale
        self._max_grad_norm = max_grad_norm
        check_modes(graph, plan.strategy, program, clips=self._clips)
        check_scaled(graph, loss_scale)
        self.device = rank_device()
        keep_freed_memory()
        self._model = one_model(workload, self.device)
        self._names = {tensor: graph.tensors[tensor].name for tensor in range(graph.num_inputs)}
        self.groups = parameter_groups(workload, self._model)
        asked = {
            "max_grad_norm": str(max_grad_norm),
            "loss_scale": "none" if loss_scale is None else str(loss_scale.scale),
            "seed": str(seed),
        }
        compare(of_workload(workload, self.groups, asked), "when the plan is deployed")
        seen = RankProgram(graph, plan.strategy, program, self.rank)
        self.part = self._make_part(seen)
        if not self.part.is_whole:
            self._model.register_forward_pre_hook(refuse_call)
        self.masters = Masters(workload.master_dtype, self.part.updated)
        self.optimizer = make_optimizer(
            workload, self.groups, self.masters.stepped, self.part.updated_groups
        )
        self.optimizer.register_step_pre_hook(refuse_second_step)
        self._unchanged = Unchanged(
            workload, self._model, self.optimizer, self.captured, self.part.sliced
        )
        self.buffers = buffers_of(graph, plan.strategy)
        self._is_closed, self._shapes = False, batch_shapes()
        self._late_ranks = LateRanks(self._shapes, self.rank)
        self._replicas: tuple[Replicas, int] | None = None  # with the step of the first comparison
        self._workload, self._seed, self._program = workload, seed, program
        self.communicator = Communicator(self.rank, (), plan.cluster.host_of)
        self._waits_for_compilers = plan.cluster.execution.compiles
        self.compiler = Compiler(self._replays()) if self._waits_for_compilers else None
        self.modes: tuple[RankMode, ...] = ()
        self._planned = planned_signature(graph)
        self._executor = self._make_executor(
            self.captured, seen, plan.task_order, plan.sent_before
        )
        self._by_shape = {self._planned: self._executor}
        self.modes = tuple(mode.on_rank(self) for mode in plan.strategy.modes)
        # When this step is no longer referenced, or at exit: gloo may abort a process that has not
        # waited for its communication.
        weakref.finalize(self, _abandon, self._by_shape)

    def _replays(self) -> Replays | None:
        """The graphs from which this rank replays compiled parts, if it does."""
        if self.plan.cluster.execution != Execution.GRAPHS:
            return None
        if not is_accelerated(self.device):
            why = "this rank computes on a CPU"
        elif not self.plan.strategy.step_barrier or self.plan.strategy.modes:
            why = "values of one step are read in the next"
        else:
            return Replays()
        _LOG.warning("the step is compiled, but its kernels are not replayed: %s", why)
        return None

    def _compare_step(self, batch: Any) -> None:
        """Compare optimizer and batch with other ranks, before some of the steps."""
        # Ranks that run freely may be in different steps and cannot wait for each other.
        if self.is_free_running or self.plan.cluster.num_devices == 1:
            return
        when = f"in step {self.num_steps + 1}"
        self._shapes.begin_step(signature(batch))
        if compared_at(self.num_steps) or compared_after(self.num_steps):
            compare(of_step(self.optimizer, batch), when)
        self._shapes.check(when)
        # Lossy messages make replicas differ.
        if not self.modes:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Compare parameters with those of other ranks, after some of the steps."""
        if self._replicas and not compared_after(self.num_steps - self._replicas[1]):
            return
        rows = {row: tensor for row, (_, tensor, _) in enumerate(self.captured.graph.updates)}
        if self._replicas is None:
            held, sharded = self.part.parameters, self.part.sharded
            whole = [None if row in sharded else held.get(each) for row, each in rows.items()]
            self._replicas = Replicas(whole), self.num_steps
        replicas, begun = self._replicas
        if compared_after(self.num_steps - begun):
            self.flush()
            names = [self._names[tensor] for tensor in rows.values()]
            when = f"after step {self.num_steps}"
            compare_weights(names, replicas, self.num_steps - begun, when)

    @property
    def _clips(self) -> bool:
        """Whether all updates wait for the norm of all gradients."""
        return self._max_grad_norm is not None or self.loss_scale is not None

    def _make_part(self, seen: RankProgram) -> ModelPart:
        """Take from the model the part that this rank holds."""
        graph, names = self.captured.graph, self._names
        named, group_of = dict(self._model.named_parameters()), group_numbers(self.groups)
        return ModelPart(
            seen,
            {tensor: named[names[tensor]] for tensor in graph.parameters},
            [group_of[names[tensor]] for _, tensor, _ in graph.updates],
        )

    def make_optimizer(self, values: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
        """Make the workload's optimizer of parameters by row of ``graph.updates``."""
        group_of = [self.part.group_of[row] for row in values]
        return make_optimizer(self._workload, self.groups, list(values.values()), group_of)

    def _keep_gradients(self, rows: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Give gradients to the modes that take them."""
        for mode in self.modes:
            mode.keep(rows, gradients)

    def _make_executor(
        self,
        captured: CapturedStep,
        seen: RankProgram,
        task_order: Sequence[int] | IntArray,
        sent_before: Sequence[tuple[int, int]] | IntArray = (),
    ) -> StepExecutor:
        """Make the executor that runs a program on this rank's part of the model."""
        share_constants(captured, self.device)
        self.communicator.open(device_sets(seen.program, seen.strategy))
        order = step_order(seen, task_order, clips=self._clips, own=True)
        return self.executor_of(captured, seen, order, sent_before)

    def executor_of(
        self,
        captured: CapturedStep,
        seen: RankProgram,
        order: StepOrder,
        sent_before: Sequence[tuple[int, int]] | IntArray,
        read_parameter: Callable[[int], Tensor] | None = None,
    ) -> StepExecutor:
        """Make an executor of a program as this rank sees it.

        Args:
            captured: The step.
            seen: The program.
            order: Order of all tasks.
            sent_before: See ``StepExecutor``.
            read_parameter: See ``StepExecutor``.
        """
        takers = [mode.takes_gradients for mode in seen.strategy.modes]
        graph = captured.graph
        held = {self._names[tensor]: value for tensor, value in self.part.parameters.items()}
        parameters = {
            tensor: held[graph.tensors[tensor].name]
            for tensor in graph.parameters
            if graph.tensors[tensor].name in held
        }
        rank = RankState(
            part=seen,
            ops=local_ops(captured, axis_plan(graph, seen.strategy.op_rules), self.device),
            communicator=self.communicator,
            parameters=parameters,
            buffers=other_inputs(captured, self._model, parameters, self.device),
            slices=self.part.slices,
            optimizer=self.optimizer,
            masters=self.masters,
            random=RandomStream(self._seed, self.device),
            device=self.device,
            push=self._keep_gradients if any(takers) else None,
        )
        return StepExecutor(
            rank,
            order.for_rank(seen),
            sent_before=sent_before,
            read_parameter=read_parameter,
            max_grad_norm=self._max_grad_norm,
            loss_scale=self.loss_scale,
            # Other shapes are mostly of a last batch: compiling takes longer than running it.
            compiler=self.compiler if captured is self.captured else None,
        )

    def _take_up(self, batch: Any) -> None:
        """Switch to the executor for a batch of these shapes."""
        executor = self._executor_for(batch)
        if executor is not self._executor:
            self._executor.flush()
            executor.num_steps = self._executor.num_steps
            executor.feedback = self._executor.feedback
            self._executor = executor

    def _executor_for(self, batch: Any) -> StepExecutor:
        """The executor for a batch of these shapes; the last few used are kept."""
        shape = signature(batch)
        found = self._by_shape.pop(shape, None)
        if found is None:
            if self.is_free_running:
                raise StrategyError(
                    "with an asynchronous server or a stash every batch has the shapes that were "
                    "planned: ranks are in different steps and cannot plan another one together. "
                    "Leave a smaller last batch out."
                )
            if {(name, dtype) for name, _, dtype in shape} != {
                (name, dtype) for name, _, dtype in self._planned
            }:
                batch_by_tensor(self.captured.graph, batch)  # reports what does not fit
            with same_draws():
                self._draw_as_now()  # the model's constants are drawn again
                step = resize(
                    self.captured.graph,
                    self._program,
                    self._workload,
                    self.plan,
                    batch,
                    clips=self._clips,
                )
            check_same_everywhere(step.program.hash)
            seen = RankProgram(step.captured.graph, step.strategy, step.program, self.rank)
            found = self._make_executor(step.captured, seen, range(step.program.num_tasks))
            others = [each for each in self._by_shape if each != self._planned]
            if len(others) >= MAX_OTHER_SHAPES:
                del self._by_shape[others[0]]
        self._by_shape[shape] = found
        return found

    @property
    def model(self) -> nn.Module:
        """The module; parameters that this rank does not hold are NaN without memory.

        So are parameters that ranks hold in slices (ZeRO-3). Parameters that the plan shards have
        the shape of this rank's slice.
        """
        self.flush()
        return self._model

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        """The parameters that this rank holds, by tensor id."""
        self.flush()
        return self.part.parameters

    def record(self, batch: Any) -> tuple[Tensor, FloatArray, FloatArray]:
        """Run one training step in which every rank records when it runs its tasks.

        Returns:
            The loss, and the start and finish of every task on all ranks, in seconds since the
            step began; NaN where none was recorded.
        """
        self._begin_step(batch)
        if self.is_free_running:
            self.settle()  # otherwise this rank could wait for one that waits for its gradients
        program = self.rank_program.program
        tasks = np.flatnonzero((program.kind == TaskKind.UPDATE) & (program.device == self.rank))
        dist.barrier()
        times = TaskTimes(dict(zip(program.subject[tasks].tolist(), tasks.tolist(), strict=True)))
        self._record_in(times)
        try:
            with self._late_ranks:
                loss = self._train(batch)
            self.flush()
            if any(mode.loss_delay for mode in self.modes):
                self.settle()
                loss = torch.tensor((float(loss), *self.take_late_losses())[-1])
        finally:
            self._record_in(None)
        return loss, *gather_task_times(times, program.num_tasks)

    def _record_in(self, recorder: TaskTimes | None) -> None:
        """Have a recorder notified of the tasks of the next steps; ``None`` ends it."""
        self._executor.recorder = recorder
        for mode in self.modes:  # alone: the plan's timeline has steps without what modes add
            mode.record(recorder, is_alone=recorder is not None)

    @property
    def is_free_running(self) -> bool:
        """Whether ranks may be in different steps, so that no code may make them wait."""
        return any(mode.is_free_running for mode in self.modes)

    def notify(self, recorder: Recorder | None) -> None:
        """Notify a recorder of this rank's tasks in all further steps of the planned shapes.

        ``record`` and ``None`` end it. On an accelerator the times are those at which kernels were
        issued.
        """
        self._by_shape[self._planned].recorder = recorder
        for mode in self.modes:
            mode.record(recorder)

    @property
    def num_steps(self) -> int:
        """Number of calls so far; to repeat steps, reset it together with the weights."""
        return self._executor.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._executor.num_steps = num_steps

    @property
    def rank_program(self) -> RankProgram:
        """The program as this rank sees it."""
        return self._executor.part

    @property
    def feedback(self) -> ErrorFeedback:
        """Parts of this rank's gradients that codecs have left out so far."""
        return self._executor.feedback

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients before clipping; ``None`` before the first one was clipped.

        Without a step barrier it is that of the previous step, until ``flush``.
        """
        return self._executor.grad_norm

    def __call__(self, batch: Any) -> Tensor:
        """Run one training step on the global batch; every rank passes the same one.

        A batch in pinned memory may be written again when the loss has been read.

        A batch of another size than the planned one (the last of an epoch), or of another length,
        is shared out in the plan's proportions. Its step is captured and lowered when its shapes
        are first seen, which takes seconds; a few shapes are kept. Means are over this batch.

        Raises:
            StrategyError: the batch has other tensors or dtypes than the plan was made for, the
                plan cannot be run on its shapes, the step was closed, ranks do not train alike,
                or something other than training has changed the model.
        """
        with self._late_ranks:
            self._begin_step(batch)
            return self._train(batch)

    def _begin_step(self, batch: Any) -> None:
        """Check that the step can be run with all ranks, and switch to the batch's shapes."""
        if self._is_closed:
            raise StrategyError("this step was closed; deploy its plan again to go on.")
        self._unchanged.check()
        check_plain_entries(self.captured, batch)
        self._compare_step(batch)
        self._take_up(batch)

    def _train(self, batch: Any) -> Tensor:
        """Run the step that was begun."""
        by_tensor = batch_by_tensor(self.rank_program.graph, batch)
        for mode in self.modes:
            mode.begin_step()
        is_behind = is_accelerated(self.device)  # kernels wait for the copy; a CPU would not
        moved = {
            name: value.to(self.device, non_blocking=is_behind)
            for name, value in by_tensor.items()
        }
        loss = self._run(moved)
        if self._waits_for_compilers and not self.is_free_running:
            self._waits_for_compilers = False
            self._shapes.wait_for_compilers()
        for mode in self.modes:
            mode.end_step(self.num_steps)
        # Schedulers warn if the optimizer has not stepped; here it may step later, or never.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _run(self, batch: Mapping[int, Tensor]) -> Tensor:
        """Run a step; a mode that runs steps itself does it."""
        for mode in self.modes:
            loss = mode.run(batch, self.num_steps)
            if loss is not None:
                self.num_steps += 1
                return loss
        return self._executor(batch)

    def flush(self) -> None:
        """Finish all updates; every rank has to call it.

        Without a step barrier some updates are open. If a rule splits the channels of a BatchNorm,
        its statistics are gathered on the first device that has some.
        """
        self._executor.flush()
        join_statistics(self._model, self.buffers, self.rank)

    def close(self) -> None:
        """Finish all updates and close the process groups; every rank has to call it.

        This is for a process that goes on with another plan: gloo's threads poll all the time, and
        those of a hundred groups take a tenth of a core. Read ``state_dict`` or save a checkpoint
        before: the step cannot be called again.
        """
        if self.is_free_running and not self._is_closed:
            self.settle()
        for mode in () if self._is_closed else self.modes:
            mode.close()
        self._executor.close()
        self._late_ranks.close()
        self._is_closed = True

    def state_dict(self) -> dict[str, Tensor] | None:
        """All parameters and buffers on rank 0, ``None`` on the others.

        A replicated parameter comes from its first replica, BatchNorm statistics from the first
        replica with samples.
        """
        from heterog.runtime.checkpoint.state import whole_state  # which imports this module

        return whole_state(self, self.model)

    def require_averaged(self) -> None:
        """Refuse while islands or teams have different models.

        Raises:
            StrategyError: islands have trained apart since the last averaging.
        """
        for mode in self.modes:
            if why := mode.why_apart(self.num_steps):
                raise StrategyError(why)

    def settle(self) -> None:
        """Give islands or teams one model; every rank has to call it after the same step.

        Islands average in the middle of a window; a server waits for all gradients; stages end
        the batches that are under way. Afterwards all ranks have the same parameters, to be read
        or saved. An exact plan has nothing to do.
        """
        self.flush()
        for mode in self.modes:
            mode.settle(self.num_steps)

    def take_late_losses(self) -> list[float]:
        """Losses that no call has returned yet, if stages of a pipeline do not wait."""
        return [loss for mode in self.modes for loss in mode.take_late_losses()]


def deploy(
    workload: Workload,
    plan: Plan,
    *,
    max_grad_norm: float | None = None,
    loss_scale: LossScale | None = None,
    seed: int = 0,
) -> DeployedStep:
    """Set up a plan on every rank of a running process group.

    Args:
        workload: Workload that the plan was made for.
        plan: Plan to run; device ``i`` of its cluster is rank ``i``.
        max_grad_norm: Largest norm over all parameters; larger gradients are scaled down to it, as
            ``torch.nn.utils.clip_grad_norm_`` does; updates then wait for all gradients.
        loss_scale: Scale of the loss, for float16: steps with gradients that are not finite change
            nothing; updates wait for all gradients. ``LossScale()`` follows torch's rules.
        seed: Seed of dropout and other random ops. Give all ranks the same; they draw different
            masks.

    Returns:
        A callable that trains one step.

    Raises:
        StrategyError: the model, the number of ranks or the program differ from the plan's; an
            op of the model cannot be executed on a part of the batch; the norm is not above 0.
    """
    step = DeployedStep(
        workload, plan, max_grad_norm=max_grad_norm, loss_scale=loss_scale, seed=seed
    )
    if not step.is_free_running and plan.cluster.num_devices > 1:
        step._late_ranks.start()
    return step


def _abandon(executors: Mapping[Signature, StepExecutor]) -> None:
    for executor in executors.values():
        with suppress(RuntimeError):  # the other ranks may be gone, or the process group
            executor.abandon()
