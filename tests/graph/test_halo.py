"""Rows owned, rows needed, sends: the published example, and any geometry against the whole op."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heterog.errors import StrategyError
from heterog.graph.placement import Arg, OpCall, TensorMeta, TensorRef
from heterog.graph.sharding_rules.legal import stencil_of
from heterog.graph.sparse_pattern import Rows, Stencil
from heterog.runtime.step.windows import Windows, fit, run_on_windows

aten = torch.ops.aten
TOLERANCE = 2e-12


def cut_rows(counts: Sequence[int]) -> tuple[Rows, ...]:
    """Rows of each part, given their numbers."""
    ends = list(accumulate(counts))
    return tuple(Rows(end - count, end) for count, end in zip(counts, ends, strict=True))


def received(owned: Sequence[Rows], needed: Sequence[Rows]) -> tuple[int, ...]:
    """Number of rows that each part needs and others own."""
    return tuple(
        sum(have.overlap(wanted).num for source, have in enumerate(owned) if source != target)
        for target, wanted in enumerate(needed)
    )


def output_rows(stencil: Stencil, size: int) -> int:
    """Number of output rows for ``size`` input rows."""
    return max((size + 2 * stencil.padding - stencil.reach) // stencil.stride + 1, 0)


def readers(stencil: Stencil, owned: Rows, output_size: int) -> Rows:
    """Output rows, of ``output_size`` in all, that read any of some input rows.

    >>> readers(Stencil(kernel=3, stride=2, padding=1), Rows(4, 8), 8)
    Rows(begin=2, end=5)
    """
    if owned.num == 0:
        return Rows(0, 0)
    begin = -((stencil.reach - 1 - stencil.padding - owned.begin) // stencil.stride)
    end = (owned.end - 1 + stencil.padding) // stencil.stride + 1
    return Rows(begin, end).clipped(output_size)


@pytest.mark.parametrize(
    ("stencil", "made", "got"),
    [
        (Stencil(kernel=3, padding=1), (12, 8, 8, 4), (1, 2, 2, 1)),
        (Stencil(kernel=3, stride=2, padding=1), (6, 4, 4, 2), (0, 1, 1, 1)),
        (Stencil(kernel=5, padding=2), (12, 8, 8, 4), (2, 4, 4, 2)),
        (Stencil(kernel=2, stride=2), (6, 4, 4, 2), (0, 0, 0, 0)),
        (Stencil(kernel=3, padding=2, dilation=2), (12, 8, 8, 4), (2, 4, 4, 2)),
        (Stencil(kernel=7, stride=2, padding=3), (6, 4, 4, 2), (2, 5, 5, 3)),
    ],
)
def test_rows_received_of_32_cut_3_2_2_1(
    stencil: Stencil, made: tuple[int, ...], got: tuple[int, ...]
) -> None:
    assert sum(made) == output_rows(stencil, 32)
    needed = [stencil.needed(rows, 32) for rows in cut_rows(made)]
    assert received(cut_rows((12, 8, 8, 4)), needed) == got


def forward_halos(width: int, parts: int, itemsize: int = 4) -> list[int]:
    """Bytes that an inner device of CosmoFlow gets in each layer: convolution, pooling, ..."""
    conv, pool = Stencil(kernel=3, padding=1), Stencil(kernel=3, stride=2, padding=1)
    found: list[int] = []
    channels, size, wanted = 1, width, 16
    while size >= parts and size > 4:
        owned = cut_rows([size // parts] * parts)
        for stencil, depth in ((conv, channels), (pool, wanted)):
            num_made = output_rows(stencil, size)
            made = cut_rows([num_made // parts] * parts)
            if num_made % parts:
                return found
            rows = received(owned, [stencil.needed(each, size) for each in made])[1]
            found.append(rows * depth * size * size * itemsize)
        channels, wanted, size = wanted, min(wanted * 2, 256), size // 2
    return found


def test_halo_bytes_of_cosmoflow_512_on_8_and_128_on_4() -> None:
    sizes = forward_halos(512, 8)
    assert [round(size / 1e6, 2) for size in sizes[:5]] == [2.1, 16.78, 8.39, 8.39, 4.19]
    # The last pooling makes 4 rows of 8, fewer than there are devices. The published sum counts
    # one row of 256 channels for it, too.
    assert (sum(sizes) + 256 * 8 * 8 * 4) / 1e6 == pytest.approx(51.3, abs=0.05)
    assert sum(forward_halos(128, 4)) / 1e6 == pytest.approx(3.15, abs=0.01)


def test_a_halo_reaches_past_a_thin_neighbour() -> None:
    owned = cut_rows((4, 1, 1, 4))
    needed = [Stencil(kernel=7, padding=3).needed(rows, 10) for rows in owned]
    assert [have.overlap(needed[3]) for have in owned[:3]] == [Rows(3, 4), Rows(4, 5), Rows(5, 6)]


def test_a_stencil_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(StrategyError, match="stride 0, padding 0 and dilation 1 cannot be split"):
        Stencil(kernel=3, stride=0)


def test_rows_outside_are_filled() -> None:
    assert fit(torch.ones(2), 0, Rows(4, 6), Rows(0, 2), -1.0).tolist() == [-1, -1]


# --- any geometry against the whole op --------------------------------------------------------


def bind(op: Any, *values: Any) -> tuple[OpCall, list[Tensor], list[Tensor]]:
    """A call of an op, its tensor inputs and outputs."""
    names = [argument.name for argument in op._schema.arguments]
    inputs: list[Tensor] = []
    args: dict[str, Arg] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, Tensor):
            args[name] = TensorRef(len(inputs))
            inputs.append(value)
        else:
            args[name] = tuple(value) if isinstance(value, list) else value
    found = op(*values)
    outputs = [
        each for each in (found if isinstance(found, tuple) else (found,)) if each is not None
    ]
    kind = f"{op._schema.name.split('::')[1]}.default"
    metas = [
        tuple(TensorMeta(tuple(t.shape), str(t.dtype).split(".")[1]) for t in tensors)
        for tensors in (inputs, outputs)
    ]
    return OpCall(kind=kind, args=args, inputs=metas[0], outputs=metas[1]), inputs, outputs


def on_parts(
    call: OpCall,
    inputs: Sequence[Tensor],
    dim: int,
    parts: Sequence[tuple[dict[int, Rows], tuple[Rows | None, ...], Rows]],
) -> list[list[Tensor]]:
    """What each part makes of its rows of the inputs."""
    made = []
    for needed, outputs, own in parts:
        local = [
            each.narrow(dim, needed[i].begin, needed[i].num) if i in needed else each
            for i, each in enumerate(inputs)
        ]
        rows = tuple(needed.get(i) for i in range(len(inputs)))
        made.append(
            run_on_windows(call, local, Windows(dim=dim, rows=rows, made=outputs, own=own))
        )
    return made


def assert_close(parts: Sequence[Tensor], whole: Tensor, dim: int | None) -> None:
    together = torch.cat(list(parts), dim) if dim is not None else sum(parts)
    assert isinstance(together, Tensor)
    torch.testing.assert_close(together, whole, rtol=TOLERANCE, atol=TOLERANCE)


@st.composite
def cuts(draw: st.DrawFn, size: int, parts: int) -> tuple[Rows, ...]:
    """Rows of some parts, which may be empty."""
    places = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return tuple(Rows(*pair) for pair in pairwise([0, *places, size]))


def numbers(draw: Any, rank: int, low: int, high: int) -> list[int]:
    return [draw(st.integers(low, high)) for _ in range(rank)]


@settings(max_examples=60)
@given(st.data())
def test_convolutions_with_any_geometry_are_exact_on_uneven_rows(data: st.DataObject) -> None:
    draw = data.draw
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    kernel, stride = numbers(draw, rank, 1, 4), numbers(draw, rank, 1, 3)
    padding, dilation = numbers(draw, rank, 0, 3), numbers(draw, rank, 1, 2)
    dim = 2 + draw(st.integers(0, rank - 1))
    sizes = [
        draw(st.integers(max(e * (k - 1) + 1 - 2 * p, 1), 11))
        for k, p, e in zip(kernel, padding, dilation, strict=True)
    ]
    if transposed:  # whose output must not be empty
        padding = [
            min(p, e * (k - 1) // 2) for p, k, e in zip(padding, kernel, dilation, strict=True)
        ]
    more = [draw(st.integers(0, s - 1)) if transposed else 0 for s in stride]
    torch.manual_seed(0)
    image = torch.randn(2, 2 * groups, *sizes, dtype=torch.float64)
    shape = (2 * groups, 3) if transposed else (3 * groups, 2)
    weight = torch.randn(*shape, *kernel, dtype=torch.float64)
    bias = torch.randn(3 * groups, dtype=torch.float64)
    tail = (stride, padding, dilation, transposed, more, groups)
    call, inputs, (output,) = bind(aten.convolution.default, image, weight, bias, *tail)
    stencil = stencil_of(call, dim)
    owned = draw(cuts(image.shape[dim], 3))
    made = draw(cuts(output.shape[dim], 3))
    size, output_size = image.shape[dim], output.shape[dim]

    def reads(rows: Rows) -> Rows:
        return readers(stencil, rows, size) if transposed else stencil.needed(rows, size)

    parts = on_parts(call, inputs, dim, [({0: reads(rows)}, (rows,), rows) for rows in made])
    assert_close([each for (each,) in parts], output, dim)

    gradient = torch.randn_like(output)
    call, inputs, outputs = bind(
        aten.convolution_backward.default, gradient, image, weight, [3 * groups], *tail,
        [True, True, True],
    )  # fmt: skip
    backward = []
    for mine, own in zip(owned, made, strict=True):
        touched = (
            stencil.needed(mine, output_size)
            if transposed
            else readers(stencil, mine, output_size)
        )
        both = [rows for rows in (touched, own) if rows.num] or [own]
        wide = Rows(min(rows.begin for rows in both), max(rows.end for rows in both))
        read = mine if transposed else stencil.needed(own, size)
        backward.append(({0: wide, 1: read}, (mine, None, None), own))
    parts = on_parts(call, inputs, dim, backward)
    for i, whole in enumerate(outputs):
        assert_close([each[i] for each in parts], whole, None if i else dim)


@settings(max_examples=60)
@given(st.data())
def test_poolings_with_any_geometry_are_exact_on_uneven_rows(data: st.DataObject) -> None:
    draw = data.draw
    rank, takes_most = draw(st.integers(2, 3)), draw(st.booleans())
    kernel, stride = numbers(draw, rank, 1, 4), numbers(draw, rank, 1, 3)
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = numbers(draw, rank, 1, 2) if takes_most else [1] * rank
    dim = 2 + draw(st.integers(0, rank - 1))
    sizes = [draw(st.integers(e * (k - 1) + 1, 9)) for k, e in zip(kernel, dilation, strict=True)]
    torch.manual_seed(0)
    image = torch.randn(2, 2, *sizes, dtype=torch.float64)
    if takes_most:
        name = f"max_pool{rank}d_with_indices"
        tail: tuple[Any, ...] = (kernel, stride, padding, dilation, False)
    else:
        name = f"avg_pool{rank}d"
        divisor = draw(st.sampled_from([None, 5]))
        tail = (kernel, stride, padding, False, draw(st.booleans()), divisor)
    call, inputs, outputs = bind(getattr(aten, name).default, image, *tail)
    stencil, size, output_size = stencil_of(call, dim), image.shape[dim], outputs[0].shape[dim]
    made = draw(cuts(output_size, 3))
    forward = [({0: stencil.needed(r, size)}, (r,) * len(outputs), r) for r in made]
    parts = on_parts(call, inputs, dim, forward)
    for i, whole in enumerate(outputs):
        assert_close([each[i] for each in parts], whole, dim)

    gradient = torch.randn_like(outputs[0])
    rest = (*tail, outputs[1]) if takes_most else tail
    call, inputs, outputs = bind(getattr(aten, f"{name}_backward").default, gradient, image, *rest)
    backward = []
    for mine in draw(cuts(size, 3)):
        touched = readers(stencil, mine, output_size)
        backward.append(({0: touched, 1: mine, 2: touched}, (mine,), mine))
    assert_close([each for (each,) in on_parts(call, inputs, dim, backward)], outputs[0], dim)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("blends", [False, True])
def test_upsampling_is_exact_on_uneven_rows(rank: int, factor: int, blends: bool) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 2, *[6, 4, 3][:rank], dtype=torch.float64)
    blended = ("linear1d", "bilinear2d", "trilinear3d")[rank - 1]
    name = f"upsample_{blended}" if blends else f"upsample_nearest{rank}d"
    sizes = [factor * size for size in image.shape[2:]]
    tail = (*([False] if blends else []), *[None] * rank)
    call, inputs, (output,) = bind(getattr(aten, name).default, image, sizes, *tail)
    owned, reach = cut_rows((3, 1, 2)), int(blends and factor > 1)

    def wide(rows: Rows) -> Rows:
        return Rows(rows.begin - reach, rows.end + reach).clipped(6)

    def times(rows: Rows) -> Rows:
        return Rows(rows.begin * factor, rows.end * factor)

    parts = on_parts(call, inputs, 2, [({0: wide(r)}, (times(r),), r) for r in owned])
    assert_close([each for (each,) in parts], output, 2)
    gradient = torch.randn_like(output)
    call, inputs, (whole,) = bind(
        getattr(aten, f"{name}_backward").default, gradient, sizes, list(image.shape), *tail
    )
    parts = on_parts(call, inputs, 2, [({0: times(wide(r))}, (r,), r) for r in owned])
    assert_close([each for (each,) in parts], whole, 2)
