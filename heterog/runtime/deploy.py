"""Deployment: a plan and a workload become a step that trains, on every rank."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.parameter_groups import group_numbers, parameter_groups
from heterog.graph.sharding_rules import local_shape
from heterog.graph.workload import Workload
from heterog.planners.plan import Plan
from heterog.runtime.accelerators import rank_device
from heterog.runtime.alike import (
    batch_shapes,
    compare,
    compare_weights,
    compared_at,
    of_step,
    of_workload,
)
from heterog.runtime.asynchronous import AsynchronousTraining, check_teams_are_alone
from heterog.runtime.averaging import Averager
from heterog.runtime.buffer_owners import buffers_of
from heterog.runtime.collectives import Communicator
from heterog.runtime.executor import StepExecutor, batch_by_tensor, device_sets, local_ops
from heterog.runtime.feedback import ErrorFeedback
from heterog.runtime.grouped_optimizer import make_optimizer
from heterog.runtime.loss_scale import LossScale, op_that_begins_backward
from heterog.runtime.masters import Masters
from heterog.runtime.model_part import ModelPart
from heterog.runtime.placed import cut, join, put
from heterog.runtime.rank_program import RankProgram
from heterog.runtime.recorder import Recorder, TaskTimes, gather_task_times
from heterog.runtime.replicas import Replicas, compared_after
from heterog.runtime.resized import Signature, by_name, planned_signature, resize, signature
from heterog.runtime.slices import SlicedBucket
from heterog.runtime.stash import StashedTraining, StashedWeights, TurnsByMoment
from heterog.runtime.step_order import StepOrder, step_order
from heterog.runtime.unchanged import Unchanged
from heterog.strategy.averaged_buckets import crossing_fault
from heterog.strategy.lowering import lower
from heterog.strategy.program import FloatArray, Program, TaskKind
from heterog.strategy.stash_phases import stage_fault
from heterog.strategy.stepping import scope_fault
from heterog.strategy.strategy import Strategy
from heterog.strategy.tables import graph_tables

MAX_OTHER_SHAPES = 8
"""Number of further batch shapes whose programs are kept: one for the last batch of an epoch, or
a few lengths; a program of BERT-large takes tens of megabytes of host memory."""


class DeployedStep:
    """A training step on one rank: call it with the global batch, get the global loss.

    Parameters live where the plan puts them; ``state_dict`` brings them together.

    A plan without a step barrier returns the loss while gradients and new parameters are still on
    their way; the next step waits for each parameter where it is read. ``flush`` ends what is
    open. So do ``state_dict``, ``model`` and ``parameters``, and like it they then have to be
    called on every rank. End with one of them before the process group is destroyed.

    Attributes:
        rank: Number of this process.
        plan: Plan that is run.
        captured: Training step as it was captured on this rank.
        part: Part of the model that this rank holds.
        groups: Parameter groups of the workload, by names.
        optimizer: Optimizer of the parameters that this rank updates. It has all groups, even
            where there is nothing to update, so that every rank can make the same scheduler. Its
            options may be changed at any time: an update uses those that held when its own step
            was called. Its state is up to date after ``flush``.
        averager: Averager of the islands' parameters every few steps, if the plan has any.
        loss_scale: Scale of the loss, if it is scaled.
        server: Object that pulls weights and pushes gradients, if there is an asynchronous server.
        stash: Batches under way, if stages of a pipeline do not wait for each other.
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
        self.rank = dist.get_rank()
        self.plan = plan
        _check_world(plan)
        plan.require_written()
        _check_masters(plan.strategy, workload)
        self.captured = _as_planned(captured or capture_step(workload), plan, workload.name)
        graph = self.captured.graph
        program = lower(graph, plan.cluster, plan.strategy, num_steps=1)
        if program.hash != plan.program_hash:
            raise StrategyError(
                f"the plan's strategy lowers to program {program.hash} here, not to the plan's "
                f"{plan.program_hash}: it was made by another version of heterog; plan again."
            )
        _check_same_everywhere(program.hash)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise StrategyError(f"max_grad_norm is {max_grad_norm}; it must be above 0.")
        self.loss_scale = loss_scale
        self._max_grad_norm = max_grad_norm
        _check_inexact(graph, plan.strategy, program, clips=self._clips)
        _check_scaled(graph, loss_scale)
        self.device = rank_device()
        self._model = _one_model(workload, self.device)
        self._names = {tensor: graph.tensors[tensor].name for tensor in range(graph.num_inputs)}
        self.groups = parameter_groups(workload, self._model)
        self._compare_workload(workload, max_grad_norm, loss_scale, seed)
        self.part = self._make_part(program)
        self.masters = Masters(workload.master_dtype, self.part.updated)
        self.optimizer = make_optimizer(
            workload, self.groups, self.masters.stepped, self.part.updated_groups
        )
        self._unchanged = Unchanged(workload, self._model, self.optimizer, graph)
        self.buffers = buffers_of(graph, plan.strategy)
        self._is_closed = False
        self._shapes = batch_shapes()
        self._replicas: tuple[Replicas, int] | None = None  # and the step of the first sight
        self._workload, self._seed, self._program = workload, seed, program
        self._communicator = Communicator(self.rank, ())
        self.averager = self._make_averager()
        self.server = self._make_server()
        self._planned = planned_signature(graph)
        self._executor = self._make_executor(
            self.captured, plan.strategy, program, plan.task_order, plan.sent_before
        )
        self._by_shape = {self._planned: self._executor}
        self.stash = self._make_stash()
        # When this step is no longer referenced, or at exit: gloo may abort a process whose
        # communication was not waited for.
        weakref.finalize(self, _abandon, self._by_shape)

    def _compare_workload(
        self,
        workload: Workload,
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
        seed: int,
    ) -> None:
        """Refuse ranks that would not train alike; see ``alike``."""
        asked = {
            "max_grad_norm": str(max_grad_norm),
            "loss_scale": "none" if loss_scale is None else str(loss_scale.scale),
            "seed": str(seed),
        }
        compare(of_workload(workload, self.groups, asked), "when the plan is deployed")

    def _compare_step(self, batch: Any) -> None:
        """Compare with other ranks what the next step trains with, in some of the steps."""
        # Ranks that run freely may be in different steps and cannot wait for each other.
        if self.is_free_running:
            return
        when = f"in step {self.num_steps + 1}"
        if compared_at(self.num_steps) or compared_after(self.num_steps):
            compare(of_step(self.optimizer, batch), when)
        self._shapes.begin_step(signature(batch), when)
        strategy = self.plan.strategy
        # Codecs leave replicas apart by what messages lack.
        if strategy.inexact is None and not strategy.codecs:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Compare parameters with those of other ranks, after some of the steps."""
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

    def _make_part(self, program: Program) -> ModelPart:
        """Take the model apart into what this rank holds of it."""
        graph, names = self.captured.graph, self._names
        named, group_of = dict(self._model.named_parameters()), group_numbers(self.groups)
        return ModelPart(
            graph,
            self.plan.strategy,
            program,
            self.rank,
            {tensor: named[names[tensor]] for tensor in graph.parameters},
            [group_of[names[tensor]] for _, tensor, _ in graph.updates],
        )

    def _make_averager(self) -> Averager | None:
        """Make the object that averages islands, if the plan has any."""
        graph, strategy = self.captured.graph, self.plan.strategy
        if strategy.averaging is None:
            return None
        parameters, masters = self.part.parameters, self.masters
        return Averager(graph, strategy, self.rank, parameters, masters, self._communicator)

    def _make_server(self) -> AsynchronousTraining | None:
        """Make the object that talks to the plan's asynchronous server, if it has one."""
        strategy, group_of = self.plan.strategy, self.part.group_of
        if strategy.asynchronous is None:
            return None
        return AsynchronousTraining(
            self.captured.graph,
            strategy,
            self.rank,
            self.part.parameters,
            self.optimizer,
            lambda values: make_optimizer(
                self._workload,
                self.groups,
                list(values.values()),
                [group_of[row] for row in values],
            ),
        )

    def _make_executor(
        self,
        captured: CapturedStep,
        strategy: Strategy,
        program: Program,
        task_order: Sequence[int],
        sent_before: Sequence[tuple[int, int]] = (),
    ) -> StepExecutor:
        """Make the executor that runs a program on this rank's part of the model."""
        seen = RankProgram(captured.graph, strategy, program, self.rank)
        self._communicator.open(device_sets(program, strategy))
        if strategy.asynchronous is not None:
            check_teams_are_alone(seen)
        order = step_order(seen, task_order, clips=self._clips)
        return self._executor_of(captured, seen, order, sent_before)

    def _executor_of(
        self,
        captured: CapturedStep,
        seen: RankProgram,
        order: StepOrder,
        sent_before: Sequence[tuple[int, int]],
        read_stashed: Callable[[int], Tensor] | None = None,
    ) -> StepExecutor:
        """Make an executor of a program as this rank sees it."""
        graph = captured.graph
        held = by_name(self.captured.graph, self.part.parameters)
        parameters = {
            tensor: held[graph.tensors[tensor].name]
            for tensor in graph.parameters
            if graph.tensors[tensor].name in held
        }
        return StepExecutor(
            seen,
            order.for_rank(seen),
            ops=local_ops(captured, axis_plan(graph, seen.strategy.op_rules), self.device),
            communicator=self._communicator,
            parameters=parameters,
            buffers=self._buffers(captured, parameters),
            sent_before=sent_before,
            optimizer=self.optimizer,
            slices=self.part.slices,
            masters=self.masters,
            push=None if self.server is None else self.server.keep,
            read_stashed=read_stashed,
            max_grad_norm=self._max_grad_norm,
            loss_scale=self.loss_scale,
            seed=self._seed,
            device=self.device,
        )

    def _make_stash(self) -> StashedTraining | None:
        """Make the object that has several batches under way, if the plan has any."""
        plan, seen = self.plan, self._executor.seen
        if plan.strategy.stash is None:
            return None
        turns = TurnsByMoment(seen, step_order(seen, plan.task_order, clips=False))

        def make_executor(weights: StashedWeights) -> StepExecutor:
            # Nobody runs ahead further than the stash lets them, so no op waits for sends.
            return self._executor_of(self.captured, seen, turns.order, (), weights.read)

        parameters = self.part.parameters
        return StashedTraining(turns, plan.strategy, self.rank, parameters, make_executor)

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
            step = resize(
                self.captured.graph,
                self._program,
                self._workload,
                self.plan,
                batch,
                clips=self._clips,
            )
            _check_same_everywhere(step.program.hash)
            found = self._make_executor(
                step.captured, step.strategy, step.program, range(step.program.num_tasks)
            )
            others = [each for each in self._by_shape if each != self._planned]
            if len(others) >= MAX_OTHER_SHAPES:
                del self._by_shape[others[0]]
        self._by_shape[shape] = found
        return found

    @property
    def model(self) -> nn.Module:
        """The module; parameters that this rank does not hold are zeros without memory.

        So are those that ranks hold in slices (ZeRO-3).
        Those that the plan shards have the shape of this rank's slice.
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
        self._take_up(batch)
        if self.is_free_running:
            self.settle()  # or a rank would wait here for one that waits for its gradients
        program = self._executor.program
        mine = (program.kind == TaskKind.UPDATE) & (program.device == self.rank)
        tasks = np.flatnonzero(mine)
        dist.barrier()
        times = TaskTimes(dict(zip(program.subject[tasks].tolist(), tasks.tolist(), strict=True)))
        self._record_in(times)
        try:
            loss = self(batch)
            self.flush()
            if self.stash is not None:
                self.settle()
                loss = torch.tensor((float(loss), *self.stash.take_late_losses())[-1])
        finally:
            self._record_in(None)
        return loss, *gather_task_times(times, program.num_tasks)

    def _record_in(self, recorder: TaskTimes | None) -> None:
        """Have a recorder notified of the tasks of the next steps, or nobody."""
        self._executor.recorder = recorder
        if self.stash is not None:
            self.stash.record(recorder)
            self.stash.is_alone = recorder is not None  # as the plan's timeline has it

    @property
    def is_free_running(self) -> bool:
        """Whether ranks may be in different steps, so that nothing may make them wait."""
        return self.server is not None or self.stash is not None

    def notify(self, recorder: Recorder | None) -> None:
        """Notify a recorder of this rank's tasks in all further steps of the planned shapes.

        ``record`` ends it. ``None`` notifies nobody. On an accelerator the times are those at
        which kernels were issued.
        """
        self._by_shape[self._planned].recorder = recorder
        if self.stash is not None:
            self.stash.record(recorder)

    @property
    def num_steps(self) -> int:
        """Number of steps called so far; to repeat steps, set it back with the weights."""
        return self._executor.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._executor.num_steps = num_steps

    @property
    def rank_program(self) -> RankProgram:
        """The program as this rank sees it."""
        return self._executor.seen

    @property
    def feedback(self) -> ErrorFeedback:
        """Parts of this rank's gradients that codecs have left out so far."""
        return self._executor.feedback

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients before clipping; ``None`` before the first one was clipped.

        Without a step barrier that of the step before, until ``flush``.
        """
        return self._executor.grad_norm

    def __call__(self, batch: Any) -> Tensor:
        """Run one training step on the global batch; every rank passes the same one.

        A batch of another size than the planned one (the last of an epoch), or of another length,
        is shared out in the plan's proportions. Its step is captured and lowered when its shapes
        are first seen, which takes seconds; a few shapes are kept. A mean is one over this batch.

        Raises:
            StrategyError: the batch has other tensors or dtypes than the plan was made for, the
                plan cannot be run on its shapes, the step was closed, ranks do not train alike,
                or the model has changed otherwise than by training.
        """
        if self._is_closed:
            raise StrategyError("this step was closed; deploy its plan again to go on.")
        self._unchanged.check()
        self._compare_step(batch)
        self._take_up(batch)
        by_tensor = batch_by_tensor(self._executor.graph, batch)
        if self.server is not None:
            with torch.no_grad():
                self.server.begin_step()
        run = self._executor if self.stash is None else self._run_stashed
        loss = run({tensor: value.to(self.device) for tensor, value in by_tensor.items()})
        if self.averager is not None:
            self.averager.after_step(self.num_steps)
        if self.server is not None:
            self.server.end_step()
        # Schedulers warn if it has not stepped yet; it may still do so, or have nothing to do.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _run_stashed(self, batch: Mapping[int, Tensor]) -> Tensor:
        """Begin a batch and end an older one."""
        assert self.stash is not None
        loss = self.stash(batch, self.num_steps)
        self.num_steps += 1
        return loss

    def flush(self) -> None:
        """Finish all updates; every rank has to call it.

        Without a step barrier some are open, and statistics of a BatchNorm whose channels a rule
        splits come together on the first of the devices that have them.
        """
        self._executor.flush()
        self._join_statistics()

    def close(self) -> None:
        """Finish all updates and close the process groups; every rank has to call it.

        For a process that goes on with another plan: gloo's threads poll all the time, those of a
        hundred groups take a tenth of a core. Before, read what is needed from ``state_dict`` or a
        checkpoint: the step cannot be called again.
        """
        if self.is_free_running and not self._is_closed:
            self.settle()
        if self.server is not None and not self._is_closed:
            self.server.close()
        self._executor.close()
        self._is_closed = True

    def state_dict(self) -> dict[str, Tensor] | None:
        """All parameters and buffers on rank 0, ``None`` on the others.

        A replicated parameter comes from its first replica, BatchNorm statistics from the first
        one with samples.
        """
        self.flush()
        graph = self.captured.graph
        named = dict(self._model.named_parameters())
        state = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        sliced = {row for bucket in self.part.buckets if bucket.stage == 3 for row in bucket.rows}
        for row, (_, parameter, _) in enumerate(graph.updates):
            name = self._names[parameter]
            if row in self.part.sharded and row not in sliced:
                whole = self._whole(row, named[name].detach())
                if whole is not None:
                    state[name] = whole
                continue
            owner = self.part.owner(row)
            if owner == 0 or row in sliced:
                continue
            self._bring(state, name, named[name].detach(), owner)
        trained = {self._names[parameter] for _, parameter, _ in graph.updates}
        for name, owner in self.buffers.owners.items():
            if owner and name in state and name not in trained:
                self._bring(state, name, state[name], owner)
        pieces: dict[int, list[tuple[int, Tensor]]] = {}
        for bucket in self.part.buckets:
            if bucket.stage == 3 and bucket.is_first:
                for row, piece in self._collect(bucket):
                    pieces.setdefault(row, []).append((bucket.ring.begin, piece))
        for row, found in pieces.items():
            state[self._names[graph.updates[row][1]]] = self._put_together(row, found)
        if self.rank != 0:
            return None
        for name, twin in _tied_names(self._model).items():
            state[name] = state[twin]
        return state

    def require_averaged(self) -> None:
        """Refuse to speak of one model while islands or teams have several.

        Raises:
            StrategyError: islands have trained apart since the last averaging.
        """
        if self.stash is not None and not self.stash.is_alike():
            raise StrategyError(
                f"after step {self.num_steps} stages of this plan have batches under way, and "
                "weights of different steps; call settle() on every rank, then read or save the "
                "model."
            )
        if self.server is not None and not self.server.is_alike(self.num_steps):
            raise StrategyError(
                f"after step {self.num_steps} the server of this plan may miss gradients, and "
                "teams have weights of different steps; call settle() on every rank, then read "
                "or save the model."
            )
        if self.averager is not None and not self.averager.is_alike(self.num_steps):
            every = self.plan.strategy.averaging.every if self.plan.strategy.averaging else 0
            raise StrategyError(
                f"after step {self.num_steps} the islands of this plan, which average every "
                f"{every} steps, have trained apart, and each has weights of its own; call "
                "settle() on every rank to average now, then read or save the model."
            )

    def settle(self) -> None:
        """Bring islands or teams together now; every rank has to call it after as many steps.

        Islands average in the middle of a window; a server waits for all gradients; stages end
        the batches that are under way. Afterwards all ranks have the same parameters, to be read
        or saved. An exact plan has nothing to do.
        """
        self.flush()
        if self.averager is not None:
            self.averager.settle(self.num_steps)
        if self.server is not None:
            with torch.no_grad():
                self.server.settle(self.num_steps)
        if self.stash is not None:
            self.stash.settle()
            self._communicator.flush()

    def _join_statistics(self) -> None:
        """Gather buffers that are updated in parts on their owner."""
        if not self.buffers.split:
            return
        # Also frozen parameters, which the forward pass may write (a target network).
        named = {name: value.detach() for name, value in self._model.named_parameters()}
        named |= dict(self._model.named_buffers())
        for name, (place, spans, members) in self.buffers.split.items():
            owner = self.buffers.owners[name]
            own = named[name]
            for device in members:
                begin, count = spans.units_of(device)
                if device == owner or count == 0 or self.rank not in (device, owner):
                    continue
                part = cut(own, place, spans.units, begin, count).contiguous()
                if self.rank == device:
                    dist.send(part, owner)
                else:
                    part = torch.empty_like(part)
                    dist.recv(part, device)
                    put(own, place, spans.units, begin, part)

    def _bring(self, state: dict[str, Tensor], name: str, own: Tensor, owner: int) -> None:
        """Send the owner's copy of a tensor to rank 0."""
        if self.rank == owner:
            dist.send(own.contiguous(), 0)
        elif self.rank == 0:
            state[name] = torch.empty_like(own)
            dist.recv(state[name], owner)

    def _collect(self, bucket: SlicedBucket) -> list[tuple[int, Tensor]]:
        """Gather the slices of a bucket on rank 0: each row with its elements, flat."""
        own = self.part.slices.own.get(bucket.number) if self.rank in bucket.devices else None
        if self.rank != 0:
            if own is not None and own.numel():
                dist.send(own.detach(), 0)
            return []
        graph = self.captured.graph
        dtype = getattr(torch, graph.tensors[graph.updates[bucket.rows[0]][1]].dtype)
        flat = torch.empty(bucket.num_elements, dtype=dtype, device=self.device)
        parts = torch.split(flat, list(bucket.counts))
        for device, part in zip(bucket.devices, parts, strict=True):
            if device == 0:
                assert own is not None
                part.copy_(own.detach())
            elif part.numel():
                dist.recv(part, device)
        return list(zip(bucket.rows, torch.split(flat, list(bucket.sizes)), strict=True))

    def _put_together(self, row: int, found: list[tuple[int, Tensor]]) -> Tensor:
        """Join the pieces of a parameter that its rings have, by first unit."""
        graph = self.captured.graph
        shape = graph.tensors[graph.updates[row][1]].shape
        if row not in self.part.sharded:
            return found[0][1].view(shape)
        place, spans = self.part.sharded[row]
        pieces = []
        for _, piece in sorted(found, key=lambda pair: pair[0]):
            units = piece.numel() * spans.units // math.prod(shape)
            pieces.append(piece.view(local_shape(shape, place, units, spans.units)))
        return join(pieces, place)

    def _whole(self, row: int, own: Tensor) -> Tensor | None:
        """Gather all slices of a sharded parameter on rank 0; ``None`` on the others."""
        place, spans = self.part.sharded[row]
        shape = self.captured.graph.tensors[self.captured.graph.updates[row][1]].shape
        parts: list[tuple[int, Tensor]] = []
        for device in spans.first_team():
            begin, count = spans.units_of(device)
            if count == 0:
                continue
            if device == 0:
                parts.append((begin, own))
            elif self.rank == device:
                dist.send(own.contiguous(), 0)
            elif self.rank == 0:
                parts.append((begin, own.new_empty(local_shape(shape, place, count, spans.units))))
                dist.recv(parts[-1][1], device)
        if self.rank != 0:
            return None
        return join([part for _, part in sorted(parts, key=lambda pair: pair[0])], place).clone()

    def _buffers(
        self, captured: CapturedStep, parameters: Mapping[int, nn.Parameter]
    ) -> dict[int, Tensor]:
        """Inputs of the step that are neither batch nor trained here: buffers and constants."""
        graph = captured.graph
        held = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        found: dict[int, Tensor] = {}
        for tensor in range(graph.num_inputs):
            meta = graph.tensors[tensor]
            if meta.kind == TensorKind.CONSTANT:
                found[tensor] = getattr(captured.module, meta.name).to(self.device)
            elif meta.kind != TensorKind.BATCH and tensor not in parameters:
                found[tensor] = held[meta.name].detach()
        return found


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
        loss_scale: Scale of the loss, for float16: steps whose gradients are not finite change
            nothing; updates wait for all gradients. ``LossScale()`` follows torch's rules.
        seed: Seed of dropout and other random ops. Give all ranks the same; they draw different
            masks.

    Returns:
        A callable that trains one step.

    Raises:
        StrategyError: the model, the number of ranks or the program differ from the plan's; an
            op of the model cannot be executed on a part of the batch; the norm is not above 0.
    """
    return DeployedStep(
        workload, plan, max_grad_norm=max_grad_norm, loss_scale=loss_scale, seed=seed
    )


def _abandon(executors: Mapping[Signature, StepExecutor]) -> None:
    for executor in executors.values():
        with suppress(RuntimeError):  # the other ranks may be gone, or the process group
            executor.abandon()


def _check_world(plan: Plan) -> None:
    ranks = dist.get_world_size()
    if ranks != plan.cluster.num_devices:
        raise StrategyError(
            f"the plan is for {plan.cluster.num_devices} devices of '{plan.cluster.name}', but "
            f"{ranks} ranks are running; start one rank per device."
        )


def _as_planned(captured: CapturedStep, plan: Plan, name: str) -> CapturedStep:
    """The captured step, with the plan's word on an optimizer that was planned by its name.

    Raises:
        StrategyError: it is another step, or its optimizer would train otherwise under the plan.
    """
    graph = captured.graph
    difference = plan.graph.describe_difference(graph)
    if difference is not None:
        raise StrategyError(f"the plan was made for another step than '{name}': {difference}.")
    if fault := scope_fault(plan.graph, plan.strategy, graph.scope):
        raise StrategyError(
            f"the plan does not suit the optimizer of '{name}': {fault}. Plan again with this "
            "workload."
        )
    if plan.graph.scope.allows(graph.scope):
        return captured
    return replace(captured, graph=replace(graph, seen_scope=plan.graph.scope))


def _check_masters(strategy: Strategy, workload: Workload) -> None:
    if strategy.asynchronous is not None and workload.master_dtype is not None:
        raise StrategyError(
            "an asynchronous server keeps weights in the model's own dtype; train without "
            "master weights, or with an exact plan."
        )


def _check_inexact(graph: OpGraph, strategy: Strategy, program: Program, *, clips: bool) -> None:
    if strategy.inexact is None:
        return
    if clips:
        raise StrategyError(
            "max_grad_norm is a norm over one gradient, and loss_scale asks for it, but the "
            "islands or stages of this plan have one each; train without them, or with an exact "
            "plan."
        )
    tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
    if fault := crossing_fault(program, strategy) or stage_fault(program, strategy, tables):
        raise StrategyError(f"{fault}.")


def _check_scaled(graph: OpGraph, loss_scale: LossScale | None) -> None:
    if loss_scale is not None and op_that_begins_backward(graph) is None:
        raise StrategyError(
            f"loss_scale cannot scale the loss of '{graph.name}': its backward pass does not "
            "begin with one loss (blocks with losses of their own have several); train without it."
        )


def _check_same_everywhere(program_hash: str) -> None:
    """All ranks must have lowered the same program, or their messages would not match."""
    mine = torch.tensor([int(program_hash, 16) >> 1], dtype=torch.int64)
    all_hashes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_hashes, mine)
    differing = [rank for rank, each in enumerate(all_hashes) if not torch.equal(each, mine)]
    if differing:
        raise StrategyError(
            f"rank {dist.get_rank()} lowered another program than ranks {differing}; every rank "
            "needs the same plan, model code and versions of torch and heterog."
        )


def _one_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model on a device, with rank 0's weights everywhere."""
    model = workload.make_model().to(device)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            dist.broadcast(value, 0)
    return model


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Names of the state dict that are other names of a parameter or buffer."""
    first: dict[int, str] = {id(value): name for name, value in model.named_parameters()}
    first |= {id(value): name for name, value in model.named_buffers()}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    kept = model.state_dict().keys()
    return {
        name: first[id(value)]
        for name, value in every
        if first[id(value)] != name and name in kept
    }
