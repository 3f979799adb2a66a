"""A small handmade model and cluster, for first steps and tests of learning."""

from heterog.cluster import Cluster, Device, Host, Link, device_type
from heterog.graph.op_graph import GraphOp, GraphTensor, OpGraph, Phase, TensorKind
from heterog.graph.placement import P, Placement, R, S


class _Chain:
    """Tensors and ops of a graph under construction."""

    def __init__(self, num_layers: int, width: int, batch_size: int) -> None:
        x = GraphTensor(
            shape=(batch_size, width), dtype="float32", kind=TensorKind.BATCH, name="x"
        )
        weights = [
            GraphTensor(
                shape=(width, width),
                dtype="float32",
                kind=TensorKind.PARAMETER,
                name=f"layers.{n}",
            )
            for n in range(num_layers)
        ]
        self.tensors = [x, *weights]
        self.ops: list[GraphOp] = []

    def add(
        self,
        kind: str,
        inputs: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        layer: int,
        phase: Phase,
        rule: tuple[tuple[Placement, ...], tuple[Placement, ...]] | None,
        flops: float,
    ) -> int:
        """Add an op; return the number of its first output."""
        first = len(self.tensors)
        made = [GraphTensor(shape=shape, dtype="float32") for shape in shapes]
        self.ops.append(
            GraphOp(
                kind=kind,
                args={},
                inputs=inputs,
                num_outputs=len(shapes),
                phase=phase,
                module=f"layers.{layer}",
                flops=flops,
                bytes_read=float(sum(self.tensors[i].num_bytes for i in inputs)),
                bytes_written=float(sum(t.num_bytes for t in made)),
                rule=rule,
            )
        )
        self.tensors += made
        return first


def chain_graph(num_layers: int = 4, width: int = 2048, batch_size: int = 32) -> OpGraph:
    """Linear layers of one width, one group each, trained by plain gradient descent.

    Args:
        num_layers: Number of layers.
        width: Inputs and outputs of each layer.
        batch_size: Number of samples.
    """
    chain = _Chain(num_layers, width, batch_size)
    add = chain.add
    rows, product = (batch_size, width), 2.0 * batch_size * width * width
    values = [0]
    last = num_layers - 1
    for layer in range(num_layers):
        rule = ((S(0), R), (S(0),))
        values.append(
            add("linear", (values[-1], 1 + layer), (rows,), layer, Phase.FORWARD, rule, product)
        )
    loss = add("loss", (values[-1],), ((), rows), last, Phase.FORWARD, ((S(0),), (P, S(0))), 1e4)
    gradient, weights = loss + 1, list[int]()
    for layer in reversed(range(num_layers)):
        rule = ((S(0), S(0)), (P,))
        inputs = values[layer], gradient
        weights.append(
            add("linear_w", inputs, ((width, width),), layer, Phase.BACKWARD, rule, product)
        )
        if layer > 0:
            rule = ((S(0), R), (S(0),))
            inputs = gradient, 1 + layer
            gradient = add("linear_x", inputs, (rows,), layer, Phase.BACKWARD, rule, product)
    for layer, made in zip(reversed(range(num_layers)), weights, strict=True):
        add("update", (1 + layer, made), ((width, width),), layer, Phase.UPDATE, None, width**2)
    return OpGraph(
        name="chain",
        source="",
        batch_size=batch_size,
        tensors=tuple(chain.tensors),
        ops=tuple(chain.ops),
        batch_placements=(S(0), *(R for _ in range(num_layers))),
        optimizer="SGD",
        optimizer_state_ratio=0.0,
        loss=loss,
    )


def toy_cluster(network_gb_per_s: float = 0.05) -> Cluster:
    """Two hosts with one V100 each and a slow network, so that one device alone is best.

    Args:
        network_gb_per_s: Rate of the NICs in 10^9 bytes per second.
    """
    of_type = device_type("V100-16GB")
    hosts = tuple(
        Host(
            name=name,
            nic_line_rate_bytes_per_s=network_gb_per_s * 1e9,
            intra=Link(kind="loopback", bandwidth_bytes_per_s=10e9),
        )
        for name in ("a", "b")
    )
    devices = tuple(
        Device(name=f"{host.name}:0", type=of_type, host_index=index, usable_memory_bytes=2**33)
        for index, host in enumerate(hosts)
    )
    return Cluster(name="toy", hosts=hosts, devices=devices, efficiency=1.0)
