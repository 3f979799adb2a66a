"""Products of rows with the matrix of their expert, without sorting the rows by expert.

Mixtures of experts sort all tokens by expert, so that each expert's rows lie together, multiply
(``_grouped_mm``), and put the rows back. A row's product depends on that row and its expert alone,
but no part of a sorted batch is the work of some samples: every device would gather all tokens
and multiply for all. ``leave_unsorted`` keeps the rows of a captured step where they are and
multiplies them by two ops of this module, which sort and put back the rows of one device.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from heterog.graph.op_costs import GROUPED_PRODUCT, RESHAPES
from heterog.graph.op_graph import GraphOp, OpGraph, Phase
from heterog.graph.placement import OpCall, R, S, TensorRef, kinds
from heterog.graph.sharding_rules import Special, propagate
from heterog.graph.sharding_rules.pointwise import FILLS
from heterog.graph.traced_constants import insert_before, node_read

aten = torch.ops.aten

_LIBRARY: Any = torch.library.Library("heterog_rows", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("product(Tensor rows, Tensor matrices, Tensor ids) -> Tensor")
_LIBRARY.define("outer(Tensor columns, Tensor rows, Tensor ids, int experts) -> Tensor")


def product(rows: Tensor, matrices: Tensor, ids: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        rows: One for each token and expert.  # [n, k]
        matrices: One for each expert.  # [experts, k, m]
        ids: Expert of each row.  # [n]

    Returns:
        # [n, m]
    """
    order, ends = _by_expert(ids, matrices.shape[0])
    rows = rows[order]
    if _has_kernel(rows, matrices):
        made = torch._grouped_mm(rows, matrices, ends)
    else:
        made = rows.new_zeros((rows.shape[0], matrices.shape[2]))
        for matrix, (begin, end) in zip(matrices, pairwise([0, *ends.tolist()]), strict=True):
            made[begin:end] = rows[begin:end] @ matrix
    return rows.new_empty(made.shape).index_copy_(0, order, made)


def outer(columns: Tensor, rows: Tensor, ids: Tensor, experts: int) -> Tensor:
    """Add up the products of columns with rows for each expert: the gradient of its matrix.

    Args:
        columns: What was multiplied.  # [k, n]
        rows: Gradients of the products.  # [n, m]
        ids: Expert of each column and its row.  # [n]
        experts: Number of experts.

    Returns:
        # [experts, k, m]
    """
    order, ends = _by_expert(ids, experts)
    columns, rows = columns.t()[order].t(), rows[order]
    if _has_kernel(columns, rows):
        return torch._grouped_mm(columns, rows, ends)
    bounds = pairwise([0, *ends.tolist()])
    return torch.stack([columns[:, begin:end] @ rows[begin:end] for begin, end in bounds])


def _by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Places of the rows in the order of their experts, and where each expert's rows end."""
    sorted_ids, order = ids.sort(stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    return order, torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)


def _has_kernel(*factors: Tensor) -> bool:
    """Whether torch's grouped product takes these dtypes and strides."""
    return all(
        each.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and each.numel() > 0
        and each.data_ptr() % 16 == 0
        and sorted(each.stride())[0] == 1
        and all(step * each.itemsize % 16 == 0 for step in each.stride() if step != 1)
        for each in factors
    )


_LIBRARY.impl("product", product, "CompositeExplicitAutograd")
_LIBRARY.impl("outer", outer, "CompositeExplicitAutograd")
torch.library.register_fake(
    "heterog_rows::product",
    lambda rows, matrices, ids: rows.new_empty((rows.shape[0], matrices.shape[2])),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "heterog_rows::outer",
    lambda columns, rows, ids, experts: rows.new_empty((experts, columns.shape[0], rows.shape[1])),
    lib=_LIBRARY,
)


def has_grouped_products(graph: fx.Graph) -> bool:
    """Whether a traced step has products for which rows may be sorted."""
    return any(node.target is aten._grouped_mm.default for node in graph.nodes)


def index_whole_rows(module: fx.GraphModule) -> None:
    """Write ops that take or add whole rows as ``index`` and as ``index_put`` into zeros.

    A gather or a scatter does no more if its index is expanded to all columns.
    """
    for node in module.graph.nodes:
        rows = _index_of_rows(node)
        if rows is None:
            continue
        whole, is_zero = node_read(node), _is_zero(node_read(node, 0))
        if node.target in (aten.gather.default, aten.index_select.default):
            made = insert_before(module, node, aten.index.Tensor, (whole, [rows]))
        else:
            added = node.args[2 if node.target is aten.index_put.default else 3]
            zeros = whole
            if not is_zero:
                zeros = insert_before(module, node, aten.zeros_like.default, (whole,))
            put = zeros, [rows], added, True
            made = insert_before(module, node, aten.index_put.default, put)
            if not is_zero:
                made = insert_before(module, node, aten.add.Tensor, (whole, made))
        node.replace_all_uses_with(made)
    module.graph.eliminate_dead_code()


_BY_ROWS = (
    *(aten.gather.default, aten.index_select.default),
    *(aten.scatter_add.default, aten.index_add.default),
)
"""Ops by an index for one dimension."""
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default)


def _index_of_rows(node: fx.Node) -> fx.Node | None:
    """A list of the rows that an op takes or to which it adds; ``None`` if it is as it should."""
    if node.target is aten.index_put.default:
        rows: Any = node.args[1]
        is_made = node.args[3:] != (True,) or len(rows) != 1 or _is_zero(node_read(node))
        return None if is_made else rows[0]
    if node.target not in _BY_ROWS or node.args[1] != 0 or node.kwargs:
        return None
    index = node_read(node, 2)
    num_rows = _shape(index)[:1]
    if len({_shape(each)[1:] for each in (*node.all_input_nodes, node)}) == 1 and (
        index.target in (aten.expand.default, aten.repeat.default)
        and _shape(node_read(index)) == (*num_rows, 1)
    ):
        index = node_read(index)
        while index.target in _VIEWS and _shape(index) != num_rows:
            index = node_read(index)
    return index if len(num_rows) == 1 and _shape(index) == num_rows else None


def _is_zero(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in _ZEROS


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def leave_unsorted(graph: OpGraph, module: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    """Keep rows in their order where a step sorts them by expert, if nothing can tell.

    Args:
        graph: The step as it was read.
        module: The traced step; it is changed.
        nodes: Its node of each op that is no update.
    """
    for op in range(graph.num_ops):
        if _sorts(graph.calls[op]):
            _Sorted(graph, module, nodes, op).leave()
    module.graph.eliminate_dead_code()


def _sorts(call: OpCall) -> bool:
    """Whether an op sorts a list, the least value first."""
    is_sort = call.kind in ("sort.default", "sort.stable")
    return is_sort and len(call.inputs[0].shape) == 1 and not call.args.get("descending")


_LOOKS_UP = "index.Tensor"
_PUTS = "index_put.default"
_COPIES = RESHAPES | {"_to_copy.default", "clone.default"}
"""Ops that keep all elements."""
_ZEROS = kinds("zeros new_zeros zeros_like")
_EVEN = FILLS | {"zeros_like.default", "ones_like.default", "full_like.default"}
"""Ops whose result is the same in any order."""


class _OrderMatters(Exception):
    """An op may tell in which order the rows are."""


class _Sorted:
    """What a step makes of rows that it sorts by expert.

    An op that can be split along the rows does the same in any order, and a sum over the rows (a
    partial result of each part) comes to the same. So sharding rules tell which tensors have
    sorted rows. Ops that count rows or put them back, which have no such rule, are known by kind.

    Args:
        graph: The step.
        module: The traced step.
        nodes: Its node of each op that is no update.
        op: The sort.
    """

    def __init__(
        self, graph: OpGraph, module: fx.GraphModule, nodes: Sequence[fx.Node], op: int
    ) -> None:
        self._graph = graph
        self._module = module
        self._nodes = nodes
        self._op = op
        self._ids = graph.ops[op].inputs[0]
        self._values, self._order = graph.outputs[op]
        self._num_rows = graph.tensors[self._ids].shape[0]
        self._dims = {self._values: 0, self._order: 0}  # of sorted rows, by tensor
        self._inverses: set[int] = set()
        self._instead: list[tuple[int, Callable[[fx.Node], Any]]] = []
        self._has_products = False

    def leave(self) -> None:
        """Keep the rows in their order if no op can tell."""
        try:
            for op in range(self._op + 1, self._graph.num_ops):
                roots = {self._root(tensor) for tensor in self._graph.ops[op].inputs}
                if not roots.isdisjoint(self._dims) or not roots.isdisjoint(self._inverses):
                    self._follow(op, self._graph.calls[op])
        except _OrderMatters:
            return
        if self._has_products:
            sort = self._nodes[self._op]
            places = self._add(sort, aten.arange.default, self._num_rows)
            for reader in list(sort.users):
                reader.replace_all_uses_with(places if reader.args[1] else node_read(sort))
            for op, made in self._instead:
                self._nodes[op].replace_all_uses_with(made(self._nodes[op]))

    def _follow(self, op: int, call: OpCall) -> None:
        """Note what an op makes of sorted rows, and what makes the same of unsorted ones."""
        index, made = self._index(op, call), self._graph.outputs[op]
        if call.kind == GROUPED_PRODUCT:
            self._multiply(op, call)
        elif _sorts(call) and self._root(self._graph.ops[op].inputs[0]) == self._order:
            self._inverses.add(made[1])
        elif index == self._order or index in self._inverses:
            self._move(op, call, sorts=(call.kind == _LOOKS_UP) == (index == self._order))
        elif not self._inverses.isdisjoint(map(self._root, self._graph.ops[op].inputs)):
            if self._root(made[0]) not in self._inverses:
                raise _OrderMatters
        elif call.kind != "histc.default":
            self._apply(op, call)
            if index >= 0:
                self._share(op, call, index)

    def _apply(self, op: int, call: OpCall) -> None:
        """Find the sorted rows that an op makes by its sharding rule."""
        inputs = self._graph.ops[op].inputs
        given = tuple(S(self._dims[each]) if each in self._dims else R for each in inputs)
        found = propagate(call, given, self._num_rows)
        if (
            found is None
            or found.special not in (None, Special.BIAS_ON_ONE_RANK)
            or self._graph.ops[op].phase == Phase.UPDATE
        ):
            raise _OrderMatters
        for tensor, have, want in zip(inputs, given, found.inputs, strict=True):
            if want != have and not self._is_made_by(tensor, _EVEN):
                raise _OrderMatters
        for tensor, place in zip(self._graph.outputs[op], found.outputs, strict=True):
            if place.kind == "S":
                self._dims[tensor] = place.dim
                size = self._graph.tensors[tensor].shape[place.dim]
                if place.outer > 1 or size != self._num_rows:
                    raise _OrderMatters

    def _move(self, op: int, call: OpCall, *, sorts: bool) -> None:
        """Follow an op that sorts rows, or puts them back."""
        moved = self._named(op, "self" if call.kind == _LOOKS_UP else "values")
        (made,), is_sorted = self._graph.outputs[op], self._dims.get(moved) == 0
        adds = call.kind == _PUTS and call.args["accumulate"] is True
        if (
            self._graph.tensors[moved].shape != self._graph.tensors[made].shape
            or (adds and not self._is_made_by(self._named(op, "self"), _ZEROS))
            or self._root(moved) in self._inverses
        ):
            raise _OrderMatters
        if call.kind == _PUTS and not sorts and not adds and self._is_range(moved):
            self._inverses.add(made)
            return
        if is_sorted == sorts or (moved in self._dims and not is_sorted):
            raise _OrderMatters
        if sorts:
            self._dims[made] = 0
        place = 0 if call.kind == _LOOKS_UP else 2
        self._instead.append((op, lambda node: node.args[place]))

    def _share(self, op: int, call: OpCall, index: int) -> None:
        """Copy each token for its experts, or add up its copies, if an index does no more."""
        whole, tokens = self._graph.outputs[op][0], self._named(op, "self")
        if call.kind == _PUTS:
            whole, tokens = self._named(op, "values"), whole
        num, *sizes = self._graph.tensors[tokens].shape
        times, maker = self._num_rows // max(num, 1), self._maker(index)
        if (
            self._graph.tensors[whole].shape != (num * times, *sizes)
            or maker is None
            or (maker.kind, maker.args.get("other")) != ("floor_divide.default", times)
            or self._root(maker.inputs[0]) != self._order
        ):
            return

        def copied(node: fx.Node) -> fx.Node:
            one = self._add(node, aten.unsqueeze.default, node.args[0], 1)
            each = self._add(node, aten.expand.default, one, [num, times, *sizes])
            rows = self._add(node, aten.clone.default, each)
            return self._add(node, aten._unsafe_view.default, rows, [num * times, *sizes])

        def summed(node: fx.Node) -> fx.Node:
            each = self._add(node, aten.view.default, node.args[2], [num, times, *sizes])
            return self._add(node, aten.sum.dim_IntList, each, [1])

        if call.kind == _LOOKS_UP:
            self._instead.append((op, copied))
        elif call.args["accumulate"] is True and self._is_made_by(self._named(op, "self"), _ZEROS):
            self._instead.append((op, summed))

    def _multiply(self, op: int, call: OpCall) -> None:
        """Follow a product of sorted rows, or the gradient of its matrices."""
        one, other, ends = (self._named(op, name) for name in ("self", "mat2", "offs"))
        (made,) = self._graph.outputs[op]
        if ends < 0 or len(call.inputs) > 3 or call.args.get("out_dtype"):
            raise _OrderMatters
        experts = self._graph.tensors[ends].shape[0]
        dims = self._dims.get(one), self._dims.get(other)
        target = torch.ops.heterog_rows.product.default
        more: list[Any] = [node_read(self._nodes[self._op])]
        if not self._are_ends(ends, experts):
            raise _OrderMatters
        if dims == (0, None):
            self._dims[made] = 0
        elif dims == (1, 0):
            target = torch.ops.heterog_rows.outer.default
            more.append(experts)
        else:
            raise _OrderMatters
        self._instead.append((op, lambda node: self._add(node, target, *node.args[:2], *more)))
        self._has_products = True

    def _are_ends(self, tensor: int, experts: int) -> bool:
        """Whether a tensor says where each expert's rows end."""
        total = self._maker(self._root(tensor, _COPIES))
        if total is None or total.kind != "cumsum.default" or total.args["dim"] not in (0, -1):
            return False
        count = self._maker(self._root(total.inputs[0], _COPIES))
        if count is None or count.kind != "histc.default":
            return False
        bins, least, most = (count.args.get(name) for name in ("bins", "min", "max"))
        counted = self._root(count.inputs[0], _COPIES)
        return (
            counted in (self._values, self._root(self._ids, _COPIES))
            and (bins, least) == (experts, 0)
            and most in (experts - 1, experts)
        )

    def _is_range(self, tensor: int) -> bool:
        """Whether a tensor is 0, 1, ... in the order of unsorted rows."""
        maker = self._maker(self._root(tensor))
        if maker is None or not maker.kind.startswith("arange."):
            return False
        return maker.args.get("start") in (None, 0) and maker.args.get("step") in (None, 1)

    def _is_made_by(self, tensor: int, kinds: Collection[str]) -> bool:
        maker = self._maker(self._root(tensor))
        return maker is not None and maker.kind in kinds

    def _maker(self, tensor: int) -> GraphOp | None:
        op = int(self._graph.producer[tensor])
        return self._graph.ops[op] if op >= 0 else None

    def _root(self, tensor: int, through: Collection[str] = RESHAPES) -> int:
        """The tensor behind views of the same shape, or behind ops ``through``."""
        maker = self._maker(tensor)
        shapes = self._graph.tensors
        while maker is not None and maker.kind in through:
            source = maker.inputs[0]
            if through is RESHAPES and shapes[source].shape != shapes[tensor].shape:
                break
            tensor, maker = source, self._maker(source)
        return tensor

    def _named(self, op: int, name: str) -> int:
        """The tensor that an argument is; -1 if it is none."""
        ref = self._graph.ops[op].args.get(name)
        return self._graph.ops[op].inputs[ref.index] if isinstance(ref, TensorRef) else -1

    def _index(self, op: int, call: OpCall) -> int:
        """The tensor (behind views) that alone chooses rows in an op; -1 if there is none."""
        given = call.args.get("indices") if call.kind in (_LOOKS_UP, _PUTS) else None
        if not isinstance(given, tuple) or len(given) != 1 or not isinstance(given[0], TensorRef):
            return -1
        return self._root(self._graph.ops[op].inputs[given[0].index])

    def _add(self, before: fx.Node, target: Any, *args: Any, **keywords: Any) -> fx.Node:
        return insert_before(self._module, before, target, args, keywords)
