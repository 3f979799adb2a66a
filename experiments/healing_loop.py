"""A loop as people write it, for torchrun: ``python healing_loop.py LOG STEPS KIND``.

After a loss it resumes from ``memory`` (KIND), or, as without heterog's healing, from a checkpoint
that rank 0 writes every hundred steps (``plain``). LOG records the events.
"""

import time

BEGUN_S = time.monotonic()  # before imports: when this rank was started

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

from heterog.balance import Balancer  # noqa: E402
from heterog.healing.loop import HealingLoop  # noqa: E402
from heterog.healing.record import write_event  # noqa: E402
from heterog.runtime.step.collectives import gather_texts  # noqa: E402

NUM_SAMPLES, BATCH_SIZE = 1000, 24
SILENT_S = 3.0
"""Seconds without an answer after which a rank gives a collective up; a cut link gives no
error."""
PAUSE_S = 0.01
SAVE_STEPS = 100


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and the number of each sample."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 32, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :8].sin(), torch.arange(NUM_SAMPLES)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in float64, so that the order of sums over ranks hardly matters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8)).double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(tell: Callable[..., None], num_steps: int, kind: str, saved: Path) -> None:
    """Train up to a step."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    model = DistributedDataParallel(model)
    balancer = Balancer(model, global_batch_size=BATCH_SIZE, interval=0)
    loader = balancer.loader(TensorDataset(*data()))
    healing, step, source = None, 0, ""
    if kind == "plain":
        if saved.exists():
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            balancer.load_state_dict(state["balancer"])
            step, source = state["step"], "checkpoint"
    else:
        healing = HealingLoop(model, optimizer, balancer, silent_s=SILENT_S)
        healing.restore()
        step, source = healing.num_steps, healing.resumed_from
    tell("taken up", step=step, source=source, ranks=dist.get_world_size())
    while step < num_steps:
        for inputs, targets, numbers in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            balancer.weigh(loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            own = numbers.tolist() if balancer.deal.samples[dist.get_rank()] else []
            told = gather_texts(json.dumps(own))
            mean, step = balancer.mean_loss(), step + 1
            if dist.get_rank() == 0:  # before its snapshot: what is gone on from was told
                dealt = [number for each in told for number in json.loads(each)]
                tell("step", step=step, loss=mean, samples=dealt, epoch=balancer.deal.epoch)
            if healing is not None:
                healing.end_step()
            elif dist.get_rank() == 0 and step % SAVE_STEPS == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "balancer": balancer.state_dict(),
                    "step": step,
                }
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            if step == num_steps:
                break
            time.sleep(PAUSE_S)
    if healing is not None:
        healing.close()
    dist.barrier()  # leaving while others still communicate aborts them


def losses_over(batches: list[list[int]]) -> list[float]:
    """Losses of one process that trains on batches of the data."""
    inputs, targets, _ = data()
    return losses_alone(*model_and_optimizer(), ((inputs[b], targets[b]) for b in batches))


def losses_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Any, Any]]
) -> list[float]:
    """Losses of one process that trains a model."""
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Be a rank."""
    log, num_steps, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    who = {"host": int(os.environ["HOST"]), "rank": int(os.environ["RANK"])}

    def tell(event: str, **more: Any) -> None:
        write_event(log, event, **who, **more)

    tell("began", at_s=BEGUN_S)
    try:
        train(tell, num_steps, kind, log.with_name("saved.pt"))
    except BaseException:
        tell("gave up")
        raise
    if who["rank"] == 0:
        tell("done")


if __name__ == "__main__":
    main()
