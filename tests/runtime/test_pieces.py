"""Parameters that are stepped in pieces: numbers and states of whole steps, to the last bit."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterog.graph.capture import capture_step
from heterog.graph.capture.reading import optimizer_step_ratios
from heterog.graph.op_graph import ELEMENTWISE_OPTIMIZERS
from heterog.graph.workload import Workload
from heterog.lowering.resident import STEPPED_BYTES_CPU
from heterog.runtime.measure.op_profiler import peak_during
from heterog.runtime.step.optimizer import keep_state_in, lying_like
from heterog.runtime.step.pieces import pieces_of
from heterog.simulator.evaluator import MEMORY_MARGIN
from tests.runtime.test_profiler import peak_of_the_second_step
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of

SHAPE = 641, 77
MOST = 4 * 8000
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in sorted(ELEMENTWISE_OPTIMIZERS)),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
)


def trained(
    name: str,
    options: Mapping[str, Any],
    step: Callable[[torch.optim.Optimizer, nn.Parameter, Tensor], None],
    *,
    state_dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = SHAPE,
) -> tuple[Tensor, dict[str, Any]]:
    """A parameter and its state after three steps, in a group with another one.

    With four dimensions its elements lie as those of images with channels last.
    """
    torch.manual_seed(0)
    lies = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    whole = nn.Parameter(torch.randn(shape).contiguous(memory_format=lies))
    other = nn.Parameter(torch.randn(3, 2))
    made = getattr(torch.optim, name)([{"params": [other, whole], "lr": 0.1}], **options)
    keep_state_in(made, state_dtype)
    for _ in range(3):
        step(made, whole, torch.randn(shape))
    assert made.param_groups[0]["params"] == [other, whole]
    state = made.state_dict()["state"]
    assert set(state) <= {0, 1}  # Adagrad makes its state when it is made
    return whole.detach(), state.get(1, {})


def at_once(made: torch.optim.Optimizer, whole: nn.Parameter, gradient: Tensor) -> None:
    whole.grad = lying_like(whole, gradient)
    made.step()
    whole.grad = None


def in_pieces(made: torch.optim.Optimizer, whole: nn.Parameter, gradient: Tensor) -> None:
    seen = 0
    for piece, place in pieces_of(made, whole, MOST):
        assert piece.nbytes <= MOST
        seen += piece.numel()
        piece.grad = lying_like(piece, gradient[place])
        made.step()
    assert seen == whole.numel()


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, (40, 32, 5, 3), (3, 10048)])
def test_pieces_have_the_bits_of_the_whole(
    name: str,
    options: dict[str, Any],
    state_dtype: torch.dtype | None,
    shape: tuple[int, ...],
) -> None:
    whole, state = trained(name, options, at_once, state_dtype=state_dtype, shape=shape)
    found, of_pieces = trained(name, options, in_pieces, state_dtype=state_dtype, shape=shape)
    assert torch.equal(found, whole)
    assert list(of_pieces) == list(state)
    for key, value in state.items():
        assert torch.equal(torch.as_tensor(of_pieces[key]), torch.as_tensor(value)), key
        assert not isinstance(value, Tensor) or of_pieces[key].dtype == value.dtype


@pytest.mark.parametrize(("name", "options"), [*CASES, ("Adafactor", {})])
def test_what_a_step_makes_is_what_was_measured_on_small_matrices(
    name: str, options: dict[str, Any]
) -> None:
    """Two large tensors in one call, beside torch's allocator; in pieces it is no more."""
    in_turn, _ = optimizer_step_ratios(getattr(torch.optim, name), options)
    both = [nn.Parameter(torch.randn(SHAPE)) for _ in range(2)]
    made = getattr(torch.optim, name)(both, **options)
    for value in both:
        value.grad = torch.randn(SHAPE)
    made.step()
    assert peak_during(made.step) / both[0].nbytes == pytest.approx(in_turn, abs=0.03)
    if name in ELEMENTWISE_OPTIMIZERS:
        gradient = torch.randn(SHAPE)
        both[1].grad = None
        peak = peak_during(lambda: in_pieces(made, both[0], gradient))
        assert peak / MOST <= in_turn + 0.03


def test_fused_optimizers_get_gradients_that_lie_as_the_weights_do() -> None:
    shape = (40, 32, 5, 3)
    plain, _ = trained("AdamW", {}, at_once, shape=shape)
    fused, _ = trained("AdamW", {"fused": True}, at_once, shape=shape)
    torch.testing.assert_close(fused, plain)


class AdamW(torch.optim.AdamW):
    """A user's, which is stepped whole: that it has a name of torch's says nothing."""


WEIGHT = 4 * 1024 * 1024  # bytes


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamW])
def test_a_step_makes_what_was_predicted(optimizer: type[torch.optim.Optimizer]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))

    batch = torch.randn(2, 1024), torch.randn(2, 1024)
    workload = Workload(model, batch, nn.functional.mse_loss, optimizer)
    captured = capture_step(workload)
    assert captured.graph.updates_elementwise
    plan = make_plan(captured.graph, cluster_of((1.0, ["CPU"])), methods=["ddp"], budget="1e")
    measured = peak_of_the_second_step(workload, plan, captured)
    (predicted,) = (each / (1 + MEMORY_MARGIN) for each in plan.peak_memory_bytes)
    # A loop over tensors keeps what it made for one until the next; here each is in its own call.
    piece = STEPPED_BYTES_CPU if optimizer is torch.optim.AdamW else WEIGHT
    assert predicted == pytest.approx(measured + piece, rel=0.01)


def test_an_error_leaves_the_optimizer_whole() -> None:
    whole = nn.Parameter(torch.zeros(SHAPE))
    made = torch.optim.Adam([whole])
    at_once(made, whole, torch.ones(SHAPE))
    pieces = pieces_of(made, whole, MOST)
    next(pieces)
    with pytest.raises(KeyboardInterrupt):
        pieces.throw(KeyboardInterrupt)
    assert made.param_groups[0]["params"] == [whole]
    assert list(made.state) == [whole]
