"""Hugging Face Accelerate on ranks."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor

from heterog.balance.for_accelerate import AcceleratedBalancer
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
    labels_that_count,
    make_model,
    make_optimizer,
    make_schedule,
    weights_of,
)


class Job:
    """What an Accelerate loop has."""

    def __init__(self, case: Case, record: Record) -> None:
        self.case = case
        unused = DistributedDataParallelKwargs(find_unused_parameters=case.freeze_after > 0)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=case.accumulate, kwargs_handlers=[unused]
        )
        self.net, self.critic = make_model(case, record), Critic()
        optimizers = [make_optimizer(self.net), make_optimizer(self.critic)]
        schedule = make_schedule(case, optimizers[0])
        self.balancer = AcceleratedBalancer(
            self.accelerator, global_batch_size=BATCH, shares=SHARES, interval=0
        )
        loader = self.balancer.loader(data_of(case), seed=SEED)
        self.val = self.balancer.loader(Samples(case, 19, seed=2), shuffle=False)
        prepare: Any = self.accelerator.prepare
        self.model, self.second_model, self.optimizer, self.second, self.loader = prepare(
            self.net, self.critic, *optimizers, loader
        )
        self.schedule = None if schedule is None else prepare(schedule)
        self.accelerator.register_for_checkpointing(self.balancer)

    def validate(self) -> None:
        """Gather labels of a second loader: each sample once."""
        with torch.no_grad():
            ids = [
                self.accelerator.gather_for_metrics((batch["ids"], self.net(**batch)["logits"]))[0]
                for batch in self.val
            ]
        assert torch.cat(ids).tolist() == list(range(19))


def on_ranks(case: Case, record: Record, folder: str) -> list[Tensor]:
    """The loop that Accelerate's guides write."""
    job, done = Job(case, record), 0
    while done < NUM_BATCHES:
        for step, batch in enumerate(job.loader):
            if case.freeze_after and done == case.freeze_after:
                job.net.first.requires_grad_(False)
            _train(job, batch, done)
            done += 1
            if done in (NUM_BATCHES, case.resume_after) or step + 1 == case.limit:
                break
        if done == case.resume_after:
            path = str(Path(folder) / "state")
            job.accelerator.save_state(path)
            job.accelerator.free_memory()
            job = Job(case, record)
            job.accelerator.load_state(path)
    return weights_of(job.net, job.critic)


def _train(job: Job, batch: Any, done: int) -> None:
    case, accelerator, balancer = job.case, job.accelerator, job.balancer
    count = labels_that_count(case, batch)
    with accelerator.accumulate(job.model):
        found = job.model(**batch)
        if case.validate_every and done % case.validate_every == 0:
            job.validate()
        accelerator.backward(balancer.weigh(found["loss"], count))
        job.optimizer.step()
        if job.schedule is not None:
            job.schedule.step()
        job.optimizer.zero_grad()
    if case.optimizers == 2:
        accelerator.backward(balancer.weigh(job.second_model(found["logits"].detach())))
        job.second.step()
        job.second.zero_grad()
