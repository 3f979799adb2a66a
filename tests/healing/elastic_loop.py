"""A loop as people write it, for torchrun: ``train(LOG, PACE)``.

It trains until the file ``enough`` is beside the log, and then to the end of the epoch. A step
takes the seconds that the file ``PACE`` says, so that a test does not train while agents start.
"""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from heterog.balance import Balancer
from heterog.healing.loop import HealingLoop
from heterog.runtime.step.collectives import gather_texts

NUM_SAMPLES, BATCH_SIZE = 50, 8


class Numbers(Dataset[tuple[Tensor, Tensor, int]]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        value = torch.randn(6, generator=generator, dtype=torch.float64)
        return value, value[:2].sin(), index


class Counts(nn.Tanh):
    """Keeps a number beside its tensors, of which it has none."""

    calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(value)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), Counts(), nn.Linear(16, 2)).double()


def everybody_sees(path: Path) -> bool:
    """Whether a file is there; all ranks say the same."""
    return all(said == "True" for said in gather_texts(str(path.exists())))


def train(log: Path, pace: Path) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    balancer = Balancer(model, global_batch_size=BATCH_SIZE, interval=0)
    loader = balancer.loader(Numbers())
    healing = HealingLoop(model, optimizer, balancer, others={"scheduler": scheduler})
    healing.restore()
    enough = log.with_name("enough")
    while not everybody_sees(enough):
        for inputs, targets, indices in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            balancer.weigh(loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            own = indices.tolist() if balancer.deal.samples[dist.get_rank()] else []
            told = gather_texts(json.dumps(own))
            mean = balancer.mean_loss()
            if dist.get_rank() == 0:
                dealt = sorted(index for each in told for index in json.loads(each))
                line = {
                    "step": healing.num_steps + 1,
                    "epoch": balancer.deal.epoch,
                    "indices": dealt,
                    "loss": mean,
                    "ranks": len(told),
                    "shares": list(balancer.shares),
                    "from": healing.resumed_from,
                    "is_kept": healing._writer is not None and healing._writer.settled is not None,
                    "at_s": time.monotonic(),
                }
                with log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            time.sleep(float(pace.read_text()))
            healing.end_step()
    healing.close()
    dist.barrier()  # leaving while others still communicate aborts them
