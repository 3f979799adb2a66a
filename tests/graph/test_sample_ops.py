"""Functions that mix samples only in memory keep them apart in a captured step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.batch_plan import batch_plan, micro_batches_refused, reads_across_samples
from heterog.graph.capture import capture_step
from heterog.graph.workload import Workload

BATCH, LENGTH = 4, 48
WINDOW = torch.hann_window(6, dtype=torch.float64)
Function = Callable[[Tensor], Tensor]
waves: Callable[..., Tensor] = partial(
    torch.stft, n_fft=8, hop_length=3, window=torch.ones(8).double(), return_complex=True
)


def images(x: Tensor) -> Tensor:
    """The batch as images whose channels are last in memory."""
    return x.view(BATCH, 4, 4, 3).permute(0, 3, 1, 2)


def assigned(x: Tensor, places: Tensor) -> Tensor:
    """Write numbers to the places of a mask, in order over the whole batch."""
    words = x.view(BATCH, 12, 4).sin()
    mask = torch.zeros(BATCH, 12, dtype=torch.bool).scatter(1, places, value=True)
    words[mask] = words[:, 6:9].flatten(0, 1) * 2
    return words


FUNCTIONS: dict[str, Function] = {
    "pool": lambda x: functional.adaptive_avg_pool2d(images(x), 1).sin(),
    "pool of a module": lambda x: nn.AdaptiveAvgPool2d((1, 1))(images(x)).sin(),
    "pool of series": lambda x: functional.adaptive_avg_pool1d(
        x.view(BATCH, 12, 4).transpose(1, 2), 1
    ).sin(),
    "pool to more": lambda x: functional.adaptive_avg_pool2d(images(x), 2).sin(),
    "waves": lambda x: waves(x).abs(),
    "waves by a window": lambda x: waves(x, window=WINDOW, win_length=6, normalized=True).abs(),
    "waves of a short frame": lambda x: waves(x, window=None, win_length=5, center=False).abs(),
    "all waves": lambda x: waves(x, onesided=False).abs(),
    "waves in pairs": lambda x: torch.view_as_complex(
        torch.stft(x, 8, window=WINDOW, win_length=6, return_complex=False)
    ).abs(),
    "waves of a complex window": lambda x: waves(
        x, window=WINDOW * (1 + 1j), win_length=6, pad_mode="constant"
    ).abs(),
    "waves of complex numbers": lambda x: waves(torch.complex(x, x.sin())).abs(),
}
OTHERS: dict[str, Function] = {
    "waves of one signal": lambda x: waves(x.flatten()).abs(),
}


class Applying(nn.Module):
    """A function of what a layer makes."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(LENGTH, LENGTH).double()
        self.function = function

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(self.layer(x), *more).pow(2).mean()


def captured(function: Callable[..., Tensor], *batch: Tensor) -> Any:
    return capture_step(Workload(lambda: Applying(function), batch, None, torch.optim.SGD))


def assert_same(step: Any, function: Callable[..., Tensor], *batch: Tensor) -> None:
    """Compare loss and gradients of a captured step with those of plain torch."""
    model = Applying(function)
    loss = model(*batch)
    torch.autograd.backward(loss)
    with torch.no_grad():
        made = torch.utils._pytree.tree_leaves(step.module(*model.parameters(), *batch))
    wanted = [loss.detach(), *(each.grad for each in model.parameters())]
    for value, expected in zip(made, wanted, strict=False):
        torch.testing.assert_close(value, expected)


@pytest.mark.filterwarnings("ignore:(A window|stft with)")
@pytest.mark.parametrize("name", FUNCTIONS | OTHERS)
def test_the_numbers_are_those_of_torch(name: str) -> None:
    function, x = (FUNCTIONS | OTHERS)[name], torch.randn(BATCH, LENGTH).double()
    assert_same(captured(function, x), function, x)


@pytest.mark.filterwarnings("ignore:(A window|stft with)")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_device_computes_its_own_samples(name: str) -> None:
    graph = captured(FUNCTIONS[name], torch.randn(BATCH, LENGTH).double()).graph
    assert not batch_plan(graph).unruled
    assert not list(reads_across_samples(graph))
    assert not micro_batches_refused(graph, 2)


def test_rows_written_by_a_mask_go_to_all_its_places_in_order() -> None:
    """Some samples may have more places than others, also than in the batch that was captured."""
    x = torch.randn(BATCH, LENGTH).double()
    places = torch.stack([torch.randperm(12)[:3] for _ in range(BATCH)])
    step = captured(assigned, x, places)
    assert_same(step, assigned, x, places)


@pytest.mark.parametrize("weighs", [False, True])
def test_counts_of_labels_below_a_number_are_sums(weighs: bool) -> None:
    def counts(x: Tensor, labels: Tensor) -> Tensor:
        weights = x.detach()[:, 0] if weighs else None
        return x * torch.bincount(labels, weights, minlength=LENGTH)

    x, labels = torch.randn(BATCH, LENGTH).double(), torch.tensor([3, 1, 3, 0])
    step = captured(counts, x, labels)
    assert batch_plan(step.graph).unruled == ()
    assert_same(step, counts, x, labels)
    labels[0] = LENGTH  # torch would count one value more
    with pytest.raises(RuntimeError, match="not below its minlength"):
        step.module(*Applying(counts).parameters(), x, labels)
