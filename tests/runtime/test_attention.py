"""Attention on devices other than the captured one: the same numbers as the captured kernels."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture_step
from heterog.graph.placement import OpCall, TensorRef
from heterog.graph.sharding_rules.table import positions
from heterog.runtime.step.local_op import local_ops
from heterog.runtime.step.special_ops import (
    ATTENTION,
    attention,
    attention_backward,
    on_masked_rows,
)
from tests.runtime.cases import workload_of

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
NAMES = ("query", "key", "value")
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_as_the_captured_kernels(is_causal: bool, masked: bool) -> None:
    if masked and is_causal:
        pytest.skip("a mask or causal, not both")
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(3, 1, 5, 5, dtype=torch.float64) if masked else None
    rest = {"attn_mask": mask, "scale": 0.3}
    wanted, kept = FORWARD(query, key, value, 0.0, is_causal, **rest)
    found, unused = attention(query, key, value, 0.0, is_causal, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, wanted)
    assert unused.shape == kept.shape
    gradient = torch.randn_like(wanted)
    wanted_back = BACKWARD(gradient, query, key, value, wanted, kept, 0.0, is_causal, **rest)
    found_back = attention_backward(
        gradient, query, key, value, found, unused, 0.0, is_causal, attn_mask=mask, scale=0.3
    )
    for mine, theirs in zip(found_back, wanted_back, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("first", "num"), [(0, 2), (2, 3), (4, 1)])
def test_rows_of_causal_attention_with_a_mask_that_ends_at_the_last(first: int, num: int) -> None:
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(3, 2, 5, 8, dtype=torch.float64) for _ in range(4))
    rest: dict[str, Any] = {"dropout_p": 0.0, "is_causal": True, "attn_mask": None, "scale": None}
    out, kept = attention(query, key, value, **rest)
    whole = attention_backward(gradient, query, key, value, out, kept, **rest)
    rows = slice(first, first + num)
    own = query[:, :, rows], key, value
    backward = gradient[:, :, rows], *own, out[:, :, rows], kept[:, :, rows]

    def run(names: str, function: Any, given: tuple[Tensor, ...]) -> list[Tensor]:
        refs = {name: TensorRef(at) for at, name in enumerate(names.split())}
        call = OpCall(kind="attention", args=refs, inputs=(), outputs=())

        def kernel(inputs: Sequence[Tensor], instead: Mapping[str, Any]) -> list[Tensor]:
            return list(function(*inputs, 0.0, **instead, scale=None))

        return on_masked_rows(call, kernel, given, first)

    found, _ = run("query key value", attention, own)
    torch.testing.assert_close(found, out[:, :, rows])
    names = "grad_out query key value out logsumexp"
    of_query, of_key, of_value = run(names, attention_backward, backward)
    torch.testing.assert_close(of_query, whole[0][:, :, rows])
    alone = torch.zeros_like(gradient)
    alone[:, :, rows] = gradient[:, :, rows]
    _, key_part, value_part = attention_backward(alone, query, key, value, out, kept, **rest)
    torch.testing.assert_close(of_key, key_part)
    torch.testing.assert_close(of_value, value_part)


def test_several_query_heads_for_one_of_keys() -> None:
    """CPU kernels take them unasked; a GPU's said that sizes of tensors must match."""
    torch.manual_seed(0)
    query, gradient = (torch.randn(3, 4, 5, 8, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(3, 2, 5, 8, dtype=torch.float64) for _ in range(2))
    rest: dict[str, Any] = {"attn_mask": None, "scale": None}
    wanted, kept = FORWARD(query, key, value, 0.0, True, **rest)
    found, unused = attention(query, key, value, 0.0, True, **rest)
    torch.testing.assert_close(found, wanted)
    wanted_back = BACKWARD(gradient, query, key, value, wanted, kept, 0.0, True, **rest)
    found_back = attention_backward(gradient, query, key, value, found, unused, 0.0, True, **rest)
    for mine, theirs in zip(found_back, wanted_back, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["gpt", "language", "llama"])
def test_a_gpus_ops_are_called_with_the_arguments_of_the_captured_ones(name: str) -> None:
    captured = capture_step(workload_of(name))
    plan = axis_plan(captured.graph)
    on_gpu = local_ops(captured, plan, torch.device("cuda"))
    torch.manual_seed(0)
    made: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    num_backward = 0
    for index, op in local_ops(captured, plan, torch.device("cpu")).items():
        call, share = op.call, op.whole
        if call.kind not in ATTENTION:
            continue
        places = positions(call, "query", "key", "value", "attn_mask")
        rest = call.args["is_causal"], call.args["scale"]
        key = *rest, tuple(call.inputs[place].shape for place in places)
        if call.kind == "attention":
            inputs = [torch.randn(call.inputs[place].shape) for place in places]
            made[key] = inputs, op(inputs, share)
            torch.testing.assert_close(on_gpu[index](inputs, share)[0], made[key][1][0])
            continue
        num_backward += 1
        inputs = [torch.randn(each.shape) for each in call.inputs]
        known = [*made[key][0], *made[key][1]]
        whence = positions(call, *NAMES, "attn_mask") + positions(call, "out", "logsumexp")
        for place, value in zip(whence, known, strict=True):
            inputs[place] = value
        torch.testing.assert_close(on_gpu[index](inputs, share), op(inputs, share))
    assert num_backward
