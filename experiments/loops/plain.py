"""Plain PyTorch: one process with whole batches, and ranks with a balancer."""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import heterog
from heterog.balance.shares import gradients_stay_local
from loops.cases import (
    BATCH,
    NUM_BATCHES,
    SEED,
    SHARES,
    Case,
    Critic,
    Record,
    Samples,
    data_of,
    global_batches,
    labels_that_count,
    make_model,
    make_optimizer,
    make_schedule,
    weights_of,
)


def alone(case: Case, record: Record, _: str) -> list[Tensor]:
    """Train in one process without this package, but for the order of samples."""
    model, critic = make_model(case, record), Critic()
    optimizer, second = make_optimizer(model), make_optimizer(critic)
    schedule = make_schedule(case, optimizer)
    batches = global_batches(case, Samples(case, case.num_samples))
    for done, (step, batch) in enumerate(islice(batches, NUM_BATCHES)):
        if case.freeze_after and done == case.freeze_after:
            model.first.requires_grad_(False)
        found = model(**batch)
        torch.autograd.backward(found["loss"] / case.accumulate)
        if case.ends_update(step):
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        if case.optimizers == 2:
            torch.autograd.backward(critic(found["logits"].detach()))
            second.step()
            second.zero_grad()
    return weights_of(model, critic)


class Job:
    """State of a plain loop, saved and restored when a job resumes."""

    def __init__(self, case: Case, record: Record, wrapper: str) -> None:
        self.case = case
        self.net, self.critic = make_model(case, record), Critic()
        self.model, self.second_model = (_wrapped(each, wrapper, case) for each in self.models)
        self.optimizer = make_optimizer(self.model)
        self.second = make_optimizer(self.second_model)
        self.schedule = make_schedule(case, self.optimizer)
        self.balancer = heterog.Balancer(
            self.model, global_batch_size=BATCH, shares=SHARES, interval=0
        )
        if case.validate_every:
            self.val = self.balancer.loader(Samples(case, 19, seed=2), shuffle=False)
        self.loader = self.balancer.loader(data_of(case), seed=SEED)

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        """The models whose weights are compared."""
        return self.net, self.critic

    def save(self, path: Path) -> None:
        """Save this rank's part."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        schedule = None if self.schedule is None else self.schedule.state_dict()
        torch.save([model, optimizer, schedule, self.balancer.state_dict()], path)

    def load(self, path: Path) -> None:
        """Go on from a file."""
        model, optimizer, schedule, data = torch.load(path, weights_only=False)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)
        self.balancer.load_state_dict(data)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """The batches of passes, each of which is left at the limit."""
        while True:
            for batch in self.loader:
                step = self.balancer.deal.step
                yield step, batch
                if step + 1 == self.case.steps:
                    break

    def validate(self) -> None:
        """Take a loss with a second loader, inside a step of the first."""
        with torch.no_grad():
            losses = []
            for batch in self.val:
                self.balancer.weigh(self.net(**batch)["loss"])
                losses.append(self.balancer.mean_loss())
        assert len(losses) == 2


def on_ranks(wrapper: str) -> Any:
    """The loop with a balancer and this wrapper."""

    def run(case: Case, record: Record, folder: str) -> list[Tensor]:
        dist.init_process_group("gloo")
        job = Job(case, record, wrapper)
        batches = job.batches()
        for done in range(NUM_BATCHES):
            if case.resume_after and done == case.resume_after:
                path = Path(folder) / f"{dist.get_rank()}.pt"
                job.save(path)
                job = Job(case, record, wrapper)
                with record.paused():  # PyTorch steps the optimizer to make its state
                    job.load(path)
                batches = job.batches()
            if case.freeze_after and done == case.freeze_after:
                job.net.first.requires_grad_(False)
            _train(job, *next(batches), done)
        return weights_of(*job.models)

    return run


def _train(job: Job, step: int, batch: Any, done: int) -> None:
    case, balancer = job.case, job.balancer
    ends = case.ends_update(step)
    count = labels_that_count(case, batch)
    with contextlib.nullcontext() if ends else gradients_stay_local(job.model):
        found = job.model(**batch)
        if case.validate_every and done % case.validate_every == 0:
            job.validate()
        torch.autograd.backward(balancer.weigh(found["loss"], count) / case.accumulate)
    if ends:
        job.optimizer.step()
        job.optimizer.zero_grad()
        if job.schedule is not None:
            job.schedule.step()
    if case.optimizers == 2:
        torch.autograd.backward(balancer.weigh(job.second_model(found["logits"].detach())))
        job.second.step()
        job.second.zero_grad()


def _wrapped(model: nn.Module, wrapper: str, case: Case) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=case.freeze_after > 0)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model
