"""What do elastic batches gain on ranks of unlike speed, and what do they cost in loss?

    python experiments/elastic_batches.py --json

Three ranks over gloo on this machine train a small GPT on seeded sequences of a rule that it can
learn (the next token is three times the last one and a step that differs from sequence to
sequence), with ``heterog.balance.ElasticAveraging``. Their clocks are told that they are 4, 2 and
1 times as fast, so that no run depends on this machine, and two runs give the same numbers. Rows:

- ``synchronous``: one process, batches as large as those of all ranks together, in the seconds
  that ranks with perfect shares would take;
- ``alike``: equally many updates of equal batches on all ranks, which wait for the slowest;
- ``dispatch``: equal batches, each handed to the rank that is free first, weights by updates;
- ``as in the paper``: batches follow updates without a dead band, weights with the boost;
- ``elastic``: the defaults.

Told are samples a second in units of the slowest rank's, and the mean loss over sequences that
were not trained on.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from typing import Any

import torch
from local_ranks import result_of_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from heterog.balance.clock import StepClock
from heterog.balance.elastic import ElasticAveraging, default_rule
from heterog.runtime.accelerators import CPU
from heterog.simulator.unequal_updates import MERGE_BOOST

SPEEDS = (4.0, 2.0, 1.0)
ROWS = ("synchronous", "alike", "dispatch", "as in the paper", "elastic")
_BATCH, _WINDOW = 32, 2100
_WORDS, _LENGTH, _STEPS = 29, 12, 5
_HELD_OUT = 512
_RATE = 0.05


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Seeded sequences of the rule, and the tokens that follow."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, _WORDS, (num_samples, 1), generator=generator)
        steps = torch.randint(0, _STEPS, (num_samples,), generator=generator)
        rows = [tokens[:, 0]]
        for _ in range(_LENGTH):
            rows.append((3 * rows[-1] + steps) % _WORDS)
        self.tokens = torch.stack(rows, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A batch: tokens, and the ones that follow."""
        chosen = self.tokens[indices]
        return chosen[:, :-1], chosen[:, 1:]


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the data set makes batches."""
    return batch


class CausalGpt(nn.Module):
    """Two causal layers of width 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 32)
        self.positions = nn.Parameter(0.1 * torch.randn(_LENGTH, 32))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(32, _WORDS)
        self.register_buffer("mask", torch.full((_LENGTH, _LENGTH), -torch.inf).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of all tokens, one row each."""
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, self.mask, is_causal=True)
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


def make_model() -> CausalGpt:
    """The seeded model."""
    torch.manual_seed(0)
    return CausalGpt()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """One update."""
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, batch))
    optimizer.step()


def held_out_loss(model: nn.Module) -> float:
    """Loss on sequences of another seed."""
    data = Sequences(_HELD_OUT, 1)
    with torch.no_grad():
        return float(loss_of(model, data.__getitems__(list(range(_HELD_OUT)))))


def synchronous(num_windows: int) -> dict[str, Any]:
    """One process with the batches of all ranks together."""
    model = make_model()
    optimizer, data = make_optimizer(model), Sequences(num_windows * _WINDOW, 0)
    size = _BATCH * len(SPEEDS)
    for begin in range(0, len(data), size):
        step(model, optimizer, data.__getitems__(list(range(begin, min(begin + size, len(data))))))
    return {"samples_per_s": sum(SPEEDS), "loss": held_out_loss(model), "batches": [size]}


def trained(row: str, rank: int, num_windows: int) -> dict[str, Any]:
    """One rank of a row."""
    now_s = [0.0]
    told = SPEEDS if row != "alike" else (1.0,) * len(SPEEDS)
    rule = default_rule(_BATCH)
    if row in ("alike", "dispatch"):
        rule = replace(rule, dead_band=math.inf)
    elif row != "elastic":
        rule = replace(rule, dead_band=0.0)
    model = make_model()
    optimizer = make_optimizer(model)
    elastic = ElasticAveraging(
        model,
        optimizer,
        batch_size=_BATCH,
        window=_WINDOW,
        rule=rule,
        boost=MERGE_BOOST if row == "as in the paper" else 0.0,
        tell=lambda _: None,
        clock=StepClock(CPU, lambda: now_s[0]),
    )
    data, seconds = Sequences(num_windows * _WINDOW, 0), []
    for window in elastic.windows(data, shuffle=False, collate_fn=as_it_is):
        for batch in window:
            now_s[0] += len(batch[0]) / told[rank]
            step(model, optimizer, batch)
        assert elastic.last is not None
        done = zip(elastic.last.updates, elastic.last.batches, SPEEDS, strict=True)
        seconds.append(max(number * size / speed for number, size, speed in done))
    late = seconds[num_windows // 2 : -1]  # when batches have settled
    return {
        "samples_per_s": _WINDOW / statistics.mean(late),
        "loss": held_out_loss(model),
        "batches": list(elastic.batches),
    }


def rows_of_ranks(rank: int, num_windows: int) -> dict[str, dict[str, Any]]:
    """All rows that need ranks."""
    return {row: trained(row, rank, num_windows) for row in ROWS[1:]}


def main() -> None:
    """Train by every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--windows", type=int, default=30, help="of samples; 4 or more")
    arguments = parser.parse_args()
    if arguments.windows < 4:
        parser.error("give --windows 4 or more: speeds are those of the later half, less its last")
    torch.set_num_threads(1)
    found = result_of_ranks(rows_of_ranks, len(SPEEDS), arguments.windows)
    found = {ROWS[0]: synchronous(arguments.windows), **found}
    if arguments.json:
        print(json.dumps({"speeds": SPEEDS, "rows": found}, indent=1))
        return
    for row, each in found.items():
        print(f"{row:16} {each['samples_per_s']:.2f} samples/s, loss {each['loss']:.4f}, batches ",
              "/".join(map(str, each["batches"])))  # fmt: skip


if __name__ == "__main__":
    main()
