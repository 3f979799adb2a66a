"""Data, models, and a record of each update."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import Dataset, IterableDataset, default_collate

from heterog.balance.shares import epoch_order

SHARES = (14, 2)
BATCH = sum(SHARES)
NUM_BATCHES = 10
"""Batches with an update each; half as many updates where two are accumulated."""
SEED = 0
RATE = 0.2
LENGTH, WORDS, CLASSES, UNCOUNTED = 6, 13, 4, -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case: what a loop does beyond the minimum.

    Attributes:
        tokens: Whether the loss is a mean over labels that count, some samples having few.
        packed: Whether such a loss gets only the labels that count, so that none is ignored.
        states_count: Whether the loop says how many labels count.
        ignores_items: Whether the model takes ``num_items_in_batch`` and ignores it.
        accumulate: Batches for each update.
        scheduled: Whether a schedule changes the learning rate after each update.
        resume_after: Batches after which everything is saved and made anew; 0 for never.
        num_samples: Samples of the data set; 96 are six whole batches.
        validate_every: Batches between validations; 0 for none.
        limit: Batches of a pass, after which it is left; 0 for all.
        optimizers: Number of optimizers.
        freeze_after: Batches after which the first layer is frozen; 0 for never.
        stream: Whether samples come from an ``IterableDataset``: ``plain``, or ``stateful`` if
            that knows its position.
    """

    tokens: bool = False
    packed: bool = False
    states_count: bool = True
    ignores_items: bool = False
    accumulate: int = 1
    scheduled: bool = False
    resume_after: int = 0
    num_samples: int = 96
    validate_every: int = 0
    limit: int = 0
    optimizers: int = 1
    freeze_after: int = 0
    stream: str = ""

    @property
    def steps(self) -> int:
        """Batches of a pass that are used."""
        whole = -(-self.num_samples // BATCH)
        return min(self.limit, whole) if self.limit else whole

    def ends_update(self, step: int) -> bool:
        """Whether an update follows a batch of a pass."""
        return (step + 1) % self.accumulate == 0 or step + 1 == self.steps

    @property
    def num_updates(self) -> int:
        """Updates of all batches."""
        return sum(self.ends_update(batch % self.steps) for batch in range(NUM_BATCHES))


CASES = {
    "sample mean": Case(),
    "token mean": Case(tokens=True),
    "unlike lengths": Case(tokens=True, packed=True),
    "unlike lengths without count": Case(tokens=True, packed=True, states_count=False),
    "ignored num_items_in_batch": Case(ignores_items=True),
    "accumulation": Case(accumulate=2, num_samples=80),
    "scheduler": Case(scheduled=True),
    "scheduler and accumulation": Case(scheduled=True, accumulate=2, num_samples=80),
    "resume inside an epoch": Case(resume_after=4, scheduled=True),
    "ragged end": Case(num_samples=81),
    "validation between": Case(validate_every=2, num_samples=83),
    "limited batches": Case(limit=3),
    "two optimizers": Case(optimizers=2),
    "frozen midway": Case(freeze_after=5),
    "stream": Case(stream="plain", num_samples=81, resume_after=3),
    "stream with a position": Case(stream="stateful", num_samples=81, resume_after=8),
}


class Samples(Dataset[dict[str, Tensor]]):
    """Random data in which a sample knows its number."""

    def __init__(self, case: Case, num_samples: int, seed: int = 1) -> None:
        random = torch.Generator().manual_seed(seed)
        self.ids = torch.arange(num_samples)
        if case.tokens:
            self.x = torch.randint(0, WORDS, (num_samples, LENGTH), generator=random)
            self.labels = torch.randint(0, CLASSES, (num_samples, LENGTH), generator=random)
            lengths = torch.randint(0, LENGTH + 1, (num_samples, 1), generator=random)
            self.labels[torch.arange(LENGTH) >= lengths] = UNCOUNTED
        else:
            self.x = torch.randn(num_samples, LENGTH, generator=random, dtype=torch.float64)
            self.labels = torch.randint(0, CLASSES, (num_samples,), generator=random)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "x": self.x[index], "labels": self.labels[index]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The samples one after another."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.place = samples, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        begin, self.place = self.place, 0
        for place in range(begin, len(self.samples)):
            self.place = place + 1
            yield self.samples[place]
        self.place = 0


class StatefulStream(Stream):
    """A stream that resumes where it was, without being read again."""

    def state_dict(self) -> dict[str, int]:
        """Its position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.place = state["place"]


def data_of(case: Case) -> Dataset[dict[str, Tensor]]:
    """The data that a balancer deals in a case."""
    samples = Samples(case, case.num_samples)
    if case.stream:
        return (StatefulStream if case.stream == "stateful" else Stream)(samples)
    return samples


class Net(nn.Module):
    """Returns a mean loss; notes the samples of each backward pass."""

    def __init__(self, case: Case, record: "Record") -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first = nn.Embedding(WORDS, 8) if case.tokens else nn.Linear(LENGTH, 8)
        self.last = nn.Linear(8, CLASSES)
        self._record, self._packed = record, case.packed
        self.double()

    def forward(self, ids: Tensor, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        logits = self.last(torch.tanh(self.first(x)))
        used = labels != UNCOUNTED if self._packed else torch.ones_like(labels, dtype=torch.bool)
        loss = nn.functional.cross_entropy(logits[used], labels[used])
        if loss.requires_grad:
            loss.register_hook(lambda _: self._record.saw(ids))  # type: ignore[no-untyped-call]
        return {"loss": loss, "logits": logits}


class NetThatIgnores(Net):
    """A head that takes the number of labels but ignores it, as many classifiers do."""

    def forward(self, ids: Tensor, x: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        """The loss of a batch."""
        return super().forward(ids, x, labels)


class Critic(nn.Module):
    """A second model with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED + 1)
        self.layer = nn.Linear(CLASSES, 1)
        self.double()

    def forward(self, logits: Tensor) -> Tensor:
        """A loss."""
        scores: Tensor = self.layer(logits)
        return (scores - 1).square().mean()


def make_model(case: Case, record: "Record") -> Net:
    """The model of a case, with the same weights in every process."""
    return (NetThatIgnores if case.ignores_items else Net)(case, record)


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    """An optimizer with a memory."""
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def make_schedule(case: Case, optimizer: Optimizer) -> torch.optim.lr_scheduler.LambdaLR | None:
    """A learning rate that differs in each update."""
    if not case.scheduled:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


def labels_that_count(case: Case, batch: dict[str, Tensor]) -> Tensor | None:
    """Number of labels that a token mean counts; ``None`` if the loop does not say."""
    return (batch["labels"] != UNCOUNTED).sum() if case.tokens and case.states_count else None


class Update(NamedTuple):
    """A step of an optimizer: its learning rate, and the samples since the one before."""

    rate: float
    samples: list[int]


class Record:
    """Notes all updates of this process, whatever the framework that makes them."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._samples: list[int] = []
        register_optimizer_step_post_hook(self._after_step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no updates in the body."""
        known = len(self.updates)
        yield
        del self.updates[known:]

    def saw(self, ids: Tensor) -> None:
        """Note the samples of a backward pass."""
        self._samples += ids.tolist()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.updates.append(Update(float(optimizer.param_groups[0]["lr"]), self._samples))
        self._samples = []


def weights_of(*models: nn.Module) -> list[Tensor]:
    """All parameters, whole."""
    return [
        (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for model in models
        for each in model.parameters()
    ]


def global_batches(case: Case, dataset: Samples) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Batches of one process, each with its step in the pass; passes are epochs."""
    for epoch in range(NUM_BATCHES):
        places = epoch_order(case.num_samples, SEED, epoch, shuffle=not case.stream)
        for step, chosen in enumerate(torch.split(torch.from_numpy(places), BATCH)[: case.steps]):
            yield step, default_collate([dataset[int(index)] for index in chosen])


Run = Callable[[Case, Record, str], list[Tensor]]
"""Trains in this process and returns the weights; the last argument is a folder of the job."""
