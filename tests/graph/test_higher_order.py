"""Control flow of torch, and compiled modules, are captured as what they compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._device import _device_constructors

from heterog.errors import CaptureError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.workload import Workload


class Flow(nn.Module):
    """Two layers, and a function that makes a result of them."""

    def __init__(self, function: Callable[["Flow", Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def captured(model: nn.Module) -> CapturedStep:
    batch = (torch.randn(6, 3, 4), torch.randn(6, 4))
    step = Workload(model, batch, nn.functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    return capture_step(step)


def loss_of(step: CapturedStep, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    inputs = [value.detach() for value in (*model.parameters(), *model.buffers())]
    constants = {node.target for node in step.module.graph.nodes if node.op == "placeholder"}
    assert len(constants) == len(inputs) + 2
    loss: Tensor = torch.fx.Interpreter(step.module).run(*inputs, x, y)[0]
    return loss


def step_of_scan(m: Flow, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    carry = torch.tanh(m.one(carry) + x)
    return carry, m.other(carry)


def by_scan(m: Flow, x: Tensor) -> Tensor:
    carry, outputs = scan(lambda c, u: step_of_scan(m, c, u), x.new_zeros(6, 4), x, dim=1)
    return carry + outputs.mean(0)  # type: ignore[no-any-return]


def by_loop(m: Flow, x: Tensor) -> Tensor:
    carry, outputs = x.new_zeros(6, 4), []
    for place in range(3):
        carry, output = step_of_scan(m, carry, x[:, place])
        outputs.append(output)
    return carry + torch.stack(outputs).mean(0)


def chosen(m: Flow, x: Tensor) -> Tensor:
    made: Tensor = torch.cond(x.mean() > 0, m.one, m.other, (x.sum(1),))
    return made


def chosen_by_if(m: Flow, x: Tensor) -> Tensor:
    made: Tensor = (m.one if x.mean() > 0 else m.other)(x.sum(1))
    return made


def by_flex_attention(m: Flow, x: Tensor) -> Tensor:
    """Two heads share a key; a score looks into a table, the first row attends to nothing."""
    table = m.other.bias
    made, logs = flex_attention(
        m.one(x).view(6, 3, 2, 2).transpose(1, 2),
        x[:, None, :, :2],
        x[:, None, :, 2:],
        score_mod=lambda score, b, h, i, j: score + table[h] * (i - j),
        block_mask=create_block_mask(lambda b, h, i, j: i > j, None, None, 3, 3, device="cpu"),
        enable_gqa=True,
        return_lse=True,
    )
    return torch.cat([made.sum((1, 2)), logs[:, :, 1]], 1)


def by_softmax(m: Flow, x: Tensor) -> Tensor:
    i, j = torch.arange(3)[:, None], torch.arange(3)
    scores = m.one(x).view(6, 3, 2, 2).transpose(1, 2) @ x[:, None, :, :2].transpose(2, 3)
    scores = scores / 2**0.5 + m.other.bias[:2, None, None] * (i - j)
    scores = scores.masked_fill(i <= j, -torch.inf)
    made = (scores.softmax(-1).nan_to_num() @ x[:, None, :, 2:]).sum((1, 2))
    return torch.cat([made, scores.logsumexp(-1)[:, :, 1]], 1)


FLOWS: dict[str, tuple[Callable[[Flow, Tensor], Tensor], Callable[[Flow, Tensor], Tensor]]] = {
    "scan": (by_scan, by_loop),
    "cond": (chosen, chosen_by_if),
    "map": (
        lambda m, x: torch_map(m.one, x.transpose(0, 1)).sum(0),
        lambda m, x: m.one(x).sum(1),
    ),
    "associative scan": (
        lambda m, x: associative_scan(torch.add, m.one(x), 1)[:, -1],
        lambda m, x: m.one(x).sum(1),
    ),
    "compiled function": (
        lambda m, x: torch.compile(lambda z: m.one(z).sin(), backend="eager")(x).sum(1),
        lambda m, x: m.one(x).sin().sum(1),
    ),
    "flex attention": (by_flex_attention, by_softmax),
}


@pytest.mark.parametrize("name", FLOWS)
def test_control_flow_computes_what_plain_python_does(name: str) -> None:
    flow, plain = FLOWS[name]
    model = Flow(flow)
    step = captured(model)
    for sign in (1.0, -1.0):
        x, y = sign * torch.rand(6, 3, 4), torch.randn(6, 4)
        with torch.no_grad():
            wanted = nn.functional.mse_loss(plain(model, x), y)
        torch.testing.assert_close(loss_of(step, model, x, y), wanted)


def test_a_forward_derivative_begins_with_zeros_that_have_memory() -> None:
    """Torch's own have none, and a rank that noted how to read them asked for their address."""
    model = Flow(lambda m, x: torch.func.jvp(m.one, (x,), (x.cos(),))[1].sum(1))
    step = captured(model)
    assert {"zeros.default"} == {each.kind for each in step.graph.ops if "zero" in each.kind}
    x, y = torch.randn(6, 3, 4), torch.randn(6, 4)
    wanted = nn.functional.mse_loss((x.cos() @ model.one.weight.T).sum(1), y)
    torch.testing.assert_close(loss_of(step, model, x, y), wanted.detach())


def test_a_compiled_model_is_the_module_inside() -> None:
    model = torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), backend="eager")
    names = [tensor.name for tensor in captured(model).graph.tensors]  # type: ignore[arg-type]
    assert names[:2] == ["1.weight", "1.bias"]


def test_a_loop_that_ends_by_values_is_refused_with_what_to_do() -> None:
    def loop(m: Flow, x: Tensor) -> Tensor:
        start = (torch.tensor(0), m.one(x))
        step = lambda i, h: (i + 1, h.exp())  # noqa: E731
        made = while_loop(lambda i, h: h.sum() < 3, step, start)  # type: ignore[no-untyped-call]
        return made[1].sum(1)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="a fixed number of passes"):
        captured(Flow(loop))


def test_a_score_that_looks_at_others_is_refused() -> None:
    def attend(m: Flow, x: Tensor) -> Tensor:
        heads = m.one(x)[:, None]
        made = flex_attention(heads, heads, heads, lambda s, b, h, i, j: s + m.one.weight[i].sum())
        return made[:, 0].sum(1)

    with pytest.raises(CaptureError, match=r"flex attention calls sum, .* Compute a table"):
        captured(Flow(attend))


class Drawing(nn.Module):
    """Adds noise, on a device that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            out: Tensor = self.layer(x) + torch.rand(2)
        return out


def test_capture_leaves_device_contexts_as_they_are() -> None:
    """``torch.rand`` is replaced meanwhile; torch remembered that instead of its own."""
    _device_constructors.cache_clear()  # as in a new process
    batch = torch.zeros(4, 2), torch.zeros(4, 2)
    loss = nn.functional.mse_loss
    capture_step(Workload(Drawing(), batch, loss, torch.optim.SGD, {"lr": 1.0}))
    with torch.device("meta"):
        assert torch.rand(2).is_meta
