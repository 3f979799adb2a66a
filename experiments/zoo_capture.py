"""What do the zoo's training steps look like, and how long does their capture take?

python experiments/zoo_capture.py --json
"""

import time
from collections import Counter

from rows import finish, script_parser

from heterog.cli.capture import graph_summary
from heterog.graph.batch_plan import batch_plan
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.zoo import build, names


def conversions(graph: OpGraph) -> dict[str, int]:
    """Gathers and reductions that batch parallelism needs inside the step, by op."""
    plan = batch_plan(graph)
    found: Counter[str] = Counter()
    for op, needed in zip(graph.ops, plan.needed, strict=True):
        for tensor, place in zip(op.inputs, needed, strict=True):
            given = plan.placements[tensor]
            if given.kind in "SP" and place != given:
                found[f"{op.kind} {given} -> {place}"] += 1
    return dict(found)


def main() -> None:
    """Capture every model and print one row each."""
    parser = script_parser(__doc__)
    parser.add_argument("--models", default=",".join(names()))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        begin = time.perf_counter()
        graph = capture(build(name))
        seconds = time.perf_counter() - begin
        row = graph_summary(graph) | {
            "capture_seconds": seconds,
            "conversions": conversions(graph),
        }
        rows.append(row)
        if not arguments.json:
            print(
                f"{name:16} batch {graph.batch_size:4} {row['num_ops']:6,} ops "
                f"{row['num_kernels']:6,} kernels {row['num_groups']:4} groups "
                f"{graph.num_parameters:13,} parameters {row['flops'] / 1e12:7.2f} TFLOP "
                f"{row['bytes_moved'] / 1e9:8.1f} GB {row['peak_live_bytes'] / 2**30:6.1f} GiB "
                f"{seconds:5.1f} s {row['ops_without_rule'] or ''} {row['conversions']}",
                flush=True,
            )
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
