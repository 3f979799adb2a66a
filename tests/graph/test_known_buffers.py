"""Buffers whose values decide what a step computes: known if no step writes them, and held to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import CaptureError, StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.workload import Workload
from heterog.runtime.step.deploy_checks import Unchanged

BATCH = torch.randn(8, 4), torch.randn(8, 2)


class Masked(nn.Module):
    """Reads a mask of features, a flag and a number from buffers."""

    mask: Tensor
    begun: Tensor
    factor: Tensor
    calls: Tensor

    def __init__(self, *, starts: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.starts, self.counts = starts, counts
        self.register_buffer("mask", torch.tensor([True, False, False, True]))
        self.register_buffer("begun", torch.tensor([not starts]))
        self.register_buffer("factor", torch.tensor(0.5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.factor.fill_(0.25)
            self.begun = torch.tensor([True])
        if self.counts:
            self.calls += 1
        scale = 1.0 if self.calls < 3 else 0.1
        made: Tensor = self.layer(x[:, self.mask]) * self.factor.item() * scale
        return made - x[:, ~self.mask]


def workload(model: Any) -> Workload:
    return Workload(model, BATCH, nn.functional.mse_loss, torch.optim.SGD, {"lr": 0.1})


def test_values_of_buffers_that_no_step_writes_are_known() -> None:
    model = Masked()
    step = capture_step(workload(model))
    assert {*step.known} == {"mask", "begun", "factor", "calls"}
    inputs = [each.detach() for each in (*model.parameters(), *model.buffers())]
    loss = torch.fx.Interpreter(step.module).run(*inputs, *BATCH)[0]
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(BATCH[0]), BATCH[1]).detach())


def test_a_buffer_that_the_step_itself_changes_is_refused() -> None:
    starting = Masked(starts=True)
    with pytest.raises(CaptureError, match=r"value of buffer 'begun', and changes it.* call the"):
        capture_step(workload(starting))
    assert not starting.begun
    with pytest.raises(CaptureError, match=r"value of buffer 'calls', and changes it"):
        capture_step(workload(Masked(counts=True)))


def test_a_model_that_its_first_batch_has_initialised_is_captured() -> None:
    def called() -> Masked:
        model = Masked(starts=True)
        model(BATCH[0])
        return model

    step = capture_step(workload(called))
    assert step.known["begun"].tolist() == [True]
    assert step.known["factor"].item() == 0.25


def test_what_depends_on_the_batch_too_is_refused_as_before() -> None:
    class Compared(Masked):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(x) * (2.0 if x.mean() > self.factor else 1.0)
            return made

    with pytest.raises(CaptureError, match=r"depends on tensor values at .*torch\.where"):
        capture_step(workload(Compared()))


def test_other_values_on_ranks_are_refused() -> None:
    model = Masked()
    step = capture_step(workload(model))
    optimizer = torch.optim.SGD(model.parameters())
    unchanged = Unchanged(workload(model), model, optimizer, step, model.parameters())
    unchanged.check()
    model.load_state_dict(model.state_dict())
    unchanged.check()
    model.factor.fill_(0.75)
    with pytest.raises(StrategyError, match=r"'factor' has another value .* \(0\.5, now 0\.75\)"):
        unchanged.check()
    model.factor.fill_(0.5)
    unchanged.check()
    model.factor.data.fill_(0.75)  # which is no new version of the buffer
    with pytest.raises(StrategyError, match=r"'factor' has another value .* \(0\.5, now 0\.75\)"):
        unchanged.check()
    model.factor.data.fill_(0.5)
    model.mask = torch.ones(4, dtype=torch.bool)
    with pytest.raises(StrategyError, match="buffer 'mask' has another value than when"):
        unchanged.check()
