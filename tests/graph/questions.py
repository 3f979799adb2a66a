"""Questions about values, as models ask them: pytest rewrites asserts of tests, but not these."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

logger = logging.getLogger(__name__)
MOST = 9

Question = Callable[[Tensor], None]


def asks_a_lists_question(x: Tensor) -> None:
    assert x.sum() in [x.max()]  # Python's list compares, and asks


class Asking(nn.Module):
    """Asks a question about its batch of integers before it computes."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        self.question(x)
        out: Tensor = self.layer(x.double())
        return out


def asserts_a_maximum(x: Tensor) -> None:
    assert x.max().item() <= MOST, "too large"


def asserts_two_bounds(x: Tensor) -> None:
    assert 0 <= x.min().item() and x.amax() < MOST + 1  # noqa: PT018 - the subject


def asserts_a_chain(x: Tensor) -> None:
    assert 0 <= x.sum() % 7 <= 5


def asserts_no_count(x: Tensor) -> None:
    assert (x > MOST).sum() == 0 and (x < 0).long().sum() == 0  # noqa: PT018


def asserts_none(x: Tensor) -> None:
    assert not ((x > MOST) | (x < 0)).any()


def asserts_all_of_a_list(x: Tensor) -> None:
    assert all(column.min() >= 0 for column in x.unbind(1))


def asserts_absence(x: Tensor) -> None:
    assert 4 not in x


def asserts_closeness(x: Tensor) -> None:
    assert torch.allclose(x.double(), torch.full_like(x, 4).double(), atol=5.0)


def raises_on_any(x: Tensor) -> None:
    if (x > MOST).any() or torch.equal(x, torch.zeros_like(x)):
        text = f"{x} is too large"
        raise ValueError(text)


def raises_if_not_all(x: Tensor) -> None:
    if not ((x >= 0) & (x <= MOST)).all():
        raise ValueError


def raises_in_else(x: Tensor) -> None:
    if bool(torch.is_nonzero((x <= MOST).all())):
        pass
    else:
        raise ValueError


def lets_torch_raise(x: Tensor) -> None:
    functional.gaussian_nll_loss(x.double(), x.double(), x.double())


def raises_with_a_setting(x: Tensor, vocabulary: int | None = MOST) -> None:
    if vocabulary is not None and x.max() > vocabulary:
        raise ValueError


class Trains(nn.Module):
    """Asks about values that have gradients, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Watched.apply(self.layer(x))  # type: ignore[no-untyped-call]
        assert not torch.isnan(out).any()
        assert out.abs().max() < 1e6
        return out


class Watched(torch.autograd.Function):
    """The identity, which does not want gradients of NaN."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        if torch.isnan(gradients[0]).any():
            raise FloatingPointError
        return gradients[0]


def prints(x: Tensor) -> None:
    if x.max().item() > MOST and x.min() < 0:
        print(f"from {x.min().item()} to {x.max().item()}")


def warns(x: Tensor) -> None:
    if 0 <= x.max() <= MOST:
        logger.warning("largest: %d", x.max())
        warnings.warn("small", stacklevel=1)


def warns_or_computes(x: Tensor) -> None:
    if x.max() > MOST:
        warnings.warn("large", stacklevel=1)
    else:
        x.add_(1)


def calls_its_own(x: Tensor) -> None:
    def print(values: Tensor) -> None:
        values.add_(1)

    if x.max() > MOST:
        print(x)


def branches(x: Tensor) -> None:
    if x.max() > MOST:
        x.clamp_(max=MOST)


def returns_early(x: Tensor) -> None:
    if x.sum() == 0:
        return
    x.add_(1)


def loops(x: Tensor) -> None:
    while x.max() > MOST:
        x.sub_(1)


def chooses(x: Tensor) -> None:
    x.add_(1 if x.max() > MOST else 2)


def catches(x: Tensor) -> None:
    try:
        assert x.max() <= MOST
    except AssertionError:
        x.clamp_(max=MOST)


def asks_for_one_of_two(x: Tensor) -> None:
    assert x.max() <= MOST or x.min() >= 0


def raises_between_bounds(x: Tensor) -> None:
    if 2 <= x.max() <= 4:
        raise ValueError


def converts(x: Tensor) -> None:
    assert int(x.max()) <= MOST


def keeps_the_number(x: Tensor) -> None:
    largest = x.max().item()
    assert largest <= MOST


def raises_with_the_number(x: Tensor) -> None:
    largest: float = x.max().item()
    if largest > MOST or x.min() < -1:
        raise ValueError(f"{largest} is too large")
    assert largest < MOST + 1, f"{largest} is too large"


def keeps_the_answer(x: Tensor) -> None:
    fits = x.max().item() <= MOST
    assert fits


def computes_with_the_number(x: Tensor) -> None:
    largest = x.max().item()
    assert largest <= MOST
    x.div_(largest, rounding_mode="floor")


def tells_the_number(x: Tensor) -> None:
    largest = x.max().item()
    if MOST > 3:
        logger.info("largest: %d", largest)
        x.add_(1)


def asks_a_list(x: Tensor) -> None:
    assert any(column.min() >= 0 for column in x.unbind(1))


def raises_after_a_choice(x: Tensor) -> None:
    if x.max() > MOST:
        if MOST > 3:
            return
        raise ValueError


def mends_what_is_not_finite(x: Tensor) -> None:
    made = x.double().reciprocal()
    if not torch.isfinite(made).all():
        made.clamp_(-1e4, 1e4)
    if made.dtype == torch.float64 and (torch.isinf(made).any() or made.isnan().any()):
        x.add_(1)


def goes_on_where_something_is_finite(x: Tensor) -> None:
    if torch.isfinite(x.double().reciprocal()).any():
        x.add_(1)
