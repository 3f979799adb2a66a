"""Kernels that ignore strides get tensors in order, wherever these come from."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture_step
from heterog.graph.workload import Workload
from heterog.runtime.step.local_op import local_ops


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(4, 4, 3, padding=1)
        self.conv = nn.utils.parametrizations.weight_norm(conv)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        made: Tensor = functional.scaled_dot_product_attention(x, x, x)
        return made


def out_of_order(value: Tensor) -> Tensor:
    """The same values with the first two dimensions last in memory, or the last one first."""
    if value.dim() < 4:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return value.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


KINDS = ("native_group_norm", "_weight_norm", "attention", "nll_loss2d")


def test_strides_change_no_result() -> None:
    batch = torch.zeros(4, 4, 6, 6), torch.zeros(4, 6, 6, dtype=torch.int64)
    workload = Workload(Model, batch, functional.cross_entropy, torch.optim.SGD)
    captured = capture_step(workload)
    ops = local_ops(captured, axis_plan(captured.graph, ()), torch.device("cpu"))
    some = [op for op in ops.values() if op.call.kind.startswith(KINDS)]
    assert len(some) == 2 * len(KINDS)  # forward and backward
    random = torch.Generator().manual_seed(0)
    for op in some:
        given = [
            torch.rand(each.shape, generator=random) + 0.5
            if each.dtype == "float32"
            else torch.randint(0, 4, each.shape, generator=random)
            for each in op.call.inputs
        ]
        wanted = op(given, op.whole)
        made = op([out_of_order(each) if each.dim() > 1 else each for each in given], op.whole)
        torch.testing.assert_close(made, wanted)
