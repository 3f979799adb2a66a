"""Compiles the numba kernels into their cache on disk, so that the first plan need not wait.

python -m heterog.simulator.compile_kernels
"""

import sys

from heterog.cluster import Cluster
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import P, R, S
from heterog.lowering.kernels import compilation_told
from heterog.simulator.evaluator import Evaluator


def smallest_graph() -> OpGraph:
    """A graph of one op, its gradient and its update."""
    shape = (8, 8)
    common = {"args": {}, "module": "op", "flops": 1.0, "bytes_read": 1.0, "bytes_written": 1.0}
    ops = (
        ("product", (0, 1), Phase.FORWARD, ((S(0), R), (S(0),))),
        ("gradient", (0, 2), Phase.BACKWARD, ((S(0), S(0)), (P,))),
        ("update", (1, 3), Phase.UPDATE, None),
    )
    return OpGraph(
        name="smallest",
        source="",
        batch_size=8,
        tensors=(
            GraphTensor(shape=shape, dtype="float32", kind=TensorKind.BATCH),
            GraphTensor(shape=shape, dtype="float32", kind=TensorKind.PARAMETER),
            *(GraphTensor(shape=shape, dtype="float32") for _ in ops),
        ),
        ops=tuple(
            GraphOp(kind=kind, inputs=inputs, num_outputs=1, phase=phase, rule=rule, **common)  # type: ignore[arg-type]
            for kind, inputs, phase, rule in ops
        ),
        batch_placements=(S(0), R),
        optimizer="SGD",
        optimizer_state_ratio=0.0,
        optimizer_step_ratios=(1.0, 1.0),
        loss=2,
    )


def main() -> None:
    """Run every kernel that a plan needs, except the one for background jobs."""
    with compilation_told(_print):
        Evaluator(smallest_graph(), Cluster.load("paper_8gpu")).warm_up()


def _print(name: str, part: float) -> None:
    sys.stderr.write(f"compile {name} ({part:.0%})\n")


if __name__ == "__main__":
    main()
