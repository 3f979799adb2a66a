"""Table look-ups and their gradients: gather, scatter, embedding, index."""

from math import prod

from heterog.graph.placement import L, OpCall, P, Placement, R, S, TensorMeta, TensorRef, kinds
from heterog.graph.sharding_rules.table import (
    Axis,
    Entry,
    RuleResult,
    Special,
    aligned,
    axis,
    dimension,
    of_op,
    positions,
    shape_of,
    splits,
)


@splits("embedding.default", linear=[("weight",)])
def _embedding(call: OpCall) -> list[Axis]:
    rank = len(shape_of(call, "indices"))
    return [
        *(axis(call, (d,), indices=d) for d in range(rank)),
        axis(call, (rank,), weight=1),
        axis(call, (P,), Special.OWN_WORDS, weight=0),
    ]


@splits("embedding_dense_backward.default", linear=[("grad_output",)])
def _embedding_backward(call: OpCall) -> list[Axis]:
    rank = len(shape_of(call, "indices"))
    axes = [axis(call, (1,), grad_output=rank)]
    # Scaling by frequency counts an index over the whole batch.
    if call.args["scale_grad_by_freq"] is not True:
        axes += [axis(call, (P,), grad_output=d, indices=d) for d in range(rank)]
    return axes


BAGS = frozenset(
    kinds("_embedding_bag _embedding_bag_backward _embedding_bag_per_sample_weights_backward")
)
"""Sums (means, maxima) over bags of rows of a table, and their gradients."""


@splits("_embedding_bag.default")
@splits(
    *kinds("_embedding_bag_backward _embedding_bag_per_sample_weights_backward"),
    linear=[("grad",)],
)
def _bag(call: OpCall) -> list[Axis]:
    """Bags of rows are split by columns; the places of maxima are one for each column."""
    if call.kind == "_embedding_bag.default":
        chosen = 1 if len(call.outputs[3].shape) == 2 else R
        return [axis(call, (1, R, R, chosen), weight=1)]
    if call.kind == "_embedding_bag_backward.default":
        chosen = 1 if len(shape_of(call, "maximum_indices")) == 2 else R
        return [axis(call, (1,), grad=1, maximum_indices=chosen)]
    return [axis(call, (P,), grad=1, weight=1)]


def split_by_bags(
    call: OpCall, placements: tuple[Placement, ...], axis_size: int, offsets: int, step: int
) -> RuleResult | None:
    """Find the rule of bags of one size, of which every sample has the same number.

    Which bag an index belongs to stays on the device, which counts bags from its own first one.

    Args:
        call: One of ``BAGS``.
        placements: Placements of its inputs.
        axis_size: Number of samples of the batch.
        offsets: Position of an input that is 0, ``step``, 2 ``step``, ... in the order of samples.
        step: Number of indices of a bag.

    Returns:
        The rule; ``None`` if this input is not where bags begin, or the indices are not split.
    """
    (indices,) = positions(call, "indices")
    num_bags, num_indices = (prod(call.inputs[each].shape) for each in (offsets, indices))
    if (
        positions(call, "offsets") != (offsets,)
        or num_bags * step != num_indices
        or placements[indices] != S(0)
        or call.args.get("scale_grad_by_freq") is True
        or call.args.get("include_last_offset") is True
    ):
        return None
    whole, local = positions(call, "weight"), positions(call, "offset2bag")

    def part(meta: TensorMeta) -> Placement:
        return S(0) if meta.shape and meta.shape[0] in (num_bags, num_indices) else R

    inputs = tuple(
        R if n in whole else L if n in local else part(meta) for n, meta in enumerate(call.inputs)
    )
    outputs: tuple[Placement, ...] = (P,)
    if call.kind == "_embedding_bag.default":
        outputs = (S(0), L, *(part(meta) for meta in call.outputs[2:]))
    elif call.kind != "_embedding_bag_backward.default":
        outputs = (S(0),)
    return RuleResult(inputs, outputs, Special.OWN_ROWS)


def row_index(call: OpCall, rule: RuleResult) -> int:
    """The input of an op with ``Special.OWN_ROWS`` that says which rows are a sample's."""
    if call.kind in BAGS:
        return positions(call, "offsets")[0]
    if call.kind in ROWS_BY_ONE_INDEX:
        return positions(call, "index")[0]
    rows = _index_refs(call)[rule.inputs[positions(call, "self")[0]].dim]
    assert rows is not None
    return rows.index


def rows_of_sample(call: OpCall, rule: RuleResult, samples: int) -> int:
    """Number of rows of a sample, at a multiple of which its own begin in ``row_index``."""
    if call.kind in BAGS:
        return 1
    (place,) = positions(call, "self")
    return call.inputs[place].shape[rule.inputs[place].dim] // samples


@splits("gather.default", linear=[("self",)])
def _gather(call: OpCall) -> list[Axis]:
    source, index = shape_of(call, "self"), shape_of(call, "index")
    along = dimension(call, "dim", len(source))
    axes = [
        axis(call, (d,), index=d) if d == along else axis(call, (d,), self=d, index=d)
        for d in range(len(source))
        if d == along or source[d] == index[d]
    ]
    if source:
        axes.append(axis(call, (P,), Special.OWN_WORDS, self=along))
    return axes


def _if_written(call: OpCall) -> list[tuple[str, str]]:
    written = call.kind in ("scatter.src", "scatter_add.default")
    adds_zero = "reduce" not in call.kind and call.args.get("value") == 0
    return [("self", "src")] if written or adds_zero else []


@splits(
    *kinds("scatter.{src,value,reduce,value_reduce} scatter_add scatter_reduce.two"),
    linear=_if_written,
    summand="self",
)
def _scatter(call: OpCall) -> list[Axis]:
    target, rank = shape_of(call, "self"), len(shape_of(call, "self"))
    along, adds = dimension(call, "dim", rank), call.kind == "scatter_add.default"
    others = {len(meta.shape) for meta in call.inputs}
    axes = [
        axis(call, (d,), self=d, index=d, **of_op(call, src=d))
        for d in range(rank)
        if d != along and all(m.shape[d] == target[d] for m in call.inputs if others == {rank})
    ]
    if adds and rank and shape_of(call, "src")[along] == shape_of(call, "index")[along]:
        axes.append(axis(call, (P,), self=P, index=along, src=along))
        axes.append(axis(call, (P,), Special.BIAS_ON_ONE_RANK, index=along, src=along))
    is_even = len({call.inputs[where].shape for where in positions(call, "index", "src")}) == 1
    if adds and rank and is_even:
        axes.append(axis(call, (along,), Special.OWN_WORDS, self=along))
    return axes


@splits("index_select.default", linear=[("self",)])
def _index_select(call: OpCall) -> list[Axis]:
    rank = len(shape_of(call, "self"))
    along = dimension(call, "dim", rank)
    axes = [axis(call, (d,), self=d) for d in range(rank) if d != along]
    if shape_of(call, "index"):
        axes.append(axis(call, (along,), index=0))
    return axes


@splits("index_add.default", linear=[("self", "source")], summand="self")
def _index_add(call: OpCall) -> list[Axis]:
    rank = len(shape_of(call, "self"))
    along = dimension(call, "dim", rank)
    axes = [axis(call, (d,), self=d, source=d) for d in range(rank) if d != along]
    if shape_of(call, "index"):
        axes.append(axis(call, (P,), self=P, index=0, source=along))
        axes.append(axis(call, (P,), Special.BIAS_ON_ONE_RANK, index=0, source=along))
    return axes


@splits("index_reduce.default")
@splits("index_copy.default", linear=[("self", "source")], summand="self")
@splits(
    "index_fill.int_Scalar", linear=lambda call: [("self",)] if call.args["value"] == 0 else []
)
@splits("index_fill.int_Tensor")
def _beside_an_index(call: OpCall) -> list[Axis]:
    rank = len(shape_of(call, "self"))
    along = dimension(call, "dim", rank)
    return [axis(call, (d,), self=d, **of_op(call, source=d)) for d in range(rank) if d != along]


@splits(*kinds("index.Tensor _unsafe_index.Tensor"), linear=[("self",)])
def _index(call: OpCall) -> list[Axis]:
    return [
        Axis((self_dim, *index_dims), (out_dim,))
        for out_dim, self_dim, index_dims in _indexed_dims(call)
    ]


@splits(
    *kinds("index_put _unsafe_index_put _index_put_impl_"),
    linear=lambda call: [] if _masks(call) else [("self", "values")],
    summand="self",
)
def _index_put(call: OpCall) -> list[Axis]:
    values, adds = shape_of(call, "values"), call.args["accumulate"] is True
    written, axes = _indexed_dims(call), []
    region = _region(call)
    for dim, self_dim, index_dims in written:
        entry = aligned(values, region, dim)
        if isinstance(self_dim, int):
            axes.append(Axis((self_dim, *index_dims, entry), (self_dim,)))
        elif adds:
            # A value spread over a split region is added by every device to its own part.
            axes.append(Axis((P, *index_dims, entry), (P,)))
            axes.append(Axis((R, *index_dims, entry), (P,), Special.BIAS_ON_ONE_RANK))
    return axes


@splits("take.default", linear=[("self",)])
def _take(call: OpCall) -> list[Axis]:
    return [axis(call, (d,), index=d) for d in range(len(shape_of(call, "index")))]


@splits("put.default")
def _put(call: OpCall) -> list[Axis]:
    # Elements of index and source pair in flat order, whatever their shapes.
    if call.args["accumulate"] is not True or shape_of(call, "index") != shape_of(call, "source"):
        return []
    dims = range(len(shape_of(call, "index")))
    return [
        *(axis(call, (P,), self=P, index=d, source=d) for d in dims),
        *(axis(call, (P,), Special.BIAS_ON_ONE_RANK, index=d, source=d) for d in dims),
    ]


@splits("searchsorted.Tensor")
def _searched(call: OpCall) -> list[Axis]:
    """Places in one sorted row for all values, or in a row of their own for those of a row."""
    rows = len(shape_of(call, "sorted_sequence")) - 1
    dims = range(len(shape_of(call, "self")))
    return [
        axis(call, (d,), self=d, **(of_op(call, sorted_sequence=d, sorter=d) if d < rows else {}))
        for d in dims
    ]


INDEXED = frozenset(
    kinds("index.Tensor _unsafe_index.Tensor index_put _unsafe_index_put _index_put_impl_")
)
"""Ops that read or write elements by one index for each of several dimensions."""
ROWS_BY_ONE_INDEX = frozenset(kinds("index_select index_add"))
"""Ops that read or write along a dimension, by an index of one dimension."""


def split_by_own_rows(
    call: OpCall,
    placements: tuple[Placement, ...],
    num_rows: int,
    rows: int,
    along: int | None = None,
) -> RuleResult | None:
    """Find the rule of an op in which every sample reads only its own rows.

    ``x[torch.arange(batch), lengths]`` takes one element of each sample; attention masks of
    ``transformers`` are made in this way. Informer takes queries from each head of each sample.
    Rules do not know the values of an index, but the caller knows that this one counts rows.

    Args:
        call: One of ``INDEXED``.
        placements: Placements of its inputs.
        num_rows: Number of rows of all samples, of which each has as many.
        rows: Position of an input that is 0, 1, ... ``num_rows - 1`` in the order of samples.
        along: Dimension along which this input counts, if it is the same along others; without
            it, the only dimension with several elements.

    Returns:
        The rule; ``None`` if no input is split like this, or the index is not for the dimension of
        the rows.
    """
    refs = _index_refs(call)
    source = shape_of(call, "self")
    place = next((at for at, ref in enumerate(refs) if ref and ref.index == rows), -1)
    if _masks(call) or place < 0 or source[place] != num_rows:
        return None
    broadcast, at, _ = _index_layout(call)
    counted = call.inputs[rows].shape
    if along is None:
        if max(counted, default=1) != num_rows or num_rows == 1:
            return None
        along = counted.index(num_rows)
    dim = along + len(broadcast) - len(counted)
    entries: list[Entry] = [R] * len(call.inputs)
    entries[positions(call, "self")[0]] = place
    for ref in refs:
        if ref:
            entries[ref.index] = aligned(call.inputs[ref.index].shape, broadcast, dim)
    for value in positions(call, "values"):
        entries[value] = aligned(call.inputs[value].shape, _region(call), at + dim)
    inputs = tuple(S(entry) if isinstance(entry, int) else entry for entry in entries)
    if any(have.kind not in "RS" for have in placements):
        return None
    if not any(have == want for have, want in zip(placements, inputs, strict=True) if have != R):
        return None  # as many rows as a sample has of something else, perhaps
    made = place if positions(call, "values") else at + dim
    return RuleResult(inputs, (S(made),), Special.OWN_ROWS)


def split_by_places(
    call: OpCall, placements: tuple[Placement, ...], num_rows: int, index: int
) -> RuleResult | None:
    """Find the rule of an op on the rows of a flattened tensor, each sample on its own ones.

    ``x.flatten(0, 1)[places + rows_of_sample * torch.arange(batch)[:, None]]`` is another way to
    write ``gather``, in graph networks of point clouds, for example.

    Args:
        call: One of ``INDEXED`` or ``ROWS_BY_ONE_INDEX``.
        placements: Placements of its inputs; that of the index is kept.
        num_rows: Number of rows of all samples, of which each has as many.
        index: Position of the index, whose values are rows of their own sample.

    Returns:
        The rule; ``None`` if the index is not for the first dimension, or not the only one.
    """
    split, (own,) = placements[index], positions(call, "self")
    if call.kind in INDEXED:
        first, *others = _index_refs(call)
        is_alone = first is not None and first.index == index and not any(others)
    else:
        is_alone = dimension(call, "dim", len(shape_of(call, "self"))) == 0
    if not is_alone or shape_of(call, "self")[0] != num_rows or placements[own] not in (R, S(0)):
        return None
    if call.inputs[index].dtype in _MASKS:
        return None
    values = positions(call, "values", "source")
    region = (*call.inputs[index].shape, *shape_of(call, "self")[1:])
    if any(call.inputs[place].shape != region for place in values):
        return None
    inputs = tuple(
        S(0) if place == own else split if place in (index, *values) else R
        for place in range(len(call.inputs))
    )
    return RuleResult(inputs, (S(0) if values else split,), Special.OWN_ROWS)


def _index_refs(call: OpCall) -> list[TensorRef | None]:
    indices = call.args["indices"]
    assert isinstance(indices, tuple)
    return [item if isinstance(item, TensorRef) else None for item in indices]


def _masks(call: OpCall) -> bool:
    refs = [ref for ref in _index_refs(call) if ref]
    return any(call.inputs[ref.index].dtype in _MASKS for ref in refs)


_MASKS = ("bool", "uint8")
"""Dtypes of indices that are no places, but say which elements to take."""


def _index_layout(call: OpCall) -> tuple[tuple[int, ...], int, list[int]]:
    """Broadcast shape of the indices, its position in the region, and the dims not indexed."""
    refs = _index_refs(call)
    shapes = [call.inputs[ref.index].shape for ref in refs if ref]
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    broadcast = tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)
    )
    places = [place for place, ref in enumerate(refs) if ref]
    adjacent = places[-1] - places[0] + 1 == len(places)
    kept = [d for d in range(len(shape_of(call, "self"))) if d not in places]
    # NumPy's rule: indices that stand apart put their dimensions in front.
    return broadcast, places[0] if adjacent else 0, kept


def _region(call: OpCall) -> tuple[int, ...]:
    """Shape of the elements of ``self`` that the indices select."""
    if _masks(call) or not any(_index_refs(call)):
        return ()
    broadcast, at, kept = _index_layout(call)
    sizes = [shape_of(call, "self")[d] for d in kept]
    return (*sizes[:at], *broadcast, *sizes[at:])


def _indexed_dims(call: OpCall) -> list[tuple[int, Entry, tuple[Entry, ...]]]:
    """For each splittable dim of the region: itself, and the dims of ``self`` and the indices.

    Empty with a mask: the number of elements it selects is known only when it runs.
    """
    if _masks(call) or not any(_index_refs(call)):
        return []
    broadcast, at, kept = _index_layout(call)
    shapes = [call.inputs[ref.index].shape for ref in _index_refs(call) if ref]
    whole: tuple[Entry, ...] = (R,) * len(shapes)
    return [
        *((d if d < at else d + len(broadcast), source, whole) for d, source in enumerate(kept)),
        *(
            (at + dim, R, tuple(aligned(shape, broadcast, dim) for shape in shapes))
            for dim in range(len(broadcast))
        ),
    ]


@splits(
    *kinds(
        "nonzero masked_select masked_scatter bincount _unique2 unique_dim "
        "repeat_interleave.Tensor _pdist_forward _pdist_backward block_diag"
    ),
)
def _whole_only(call: OpCall) -> list[Axis]:
    # The result of a row, and even the output's shape, depend on the other rows.
    return []
