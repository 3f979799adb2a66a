"""See what a faster network would be worth before you buy it."""

from pathlib import Path

import heterog
from heterog.cluster.spec import parse_cluster
from heterog.envs.toy import chain_graph

LAB = """
schema_version: 1
name: lab
hosts:
  - name: node
    count: 2
    devices: [{{type: V100-16GB, count: 2}}]
    intra: nvlink_v100
    nic: {{line_rate: {rate} Gbit/s}}
"""


def main() -> None:
    """Predict the step of plain data parallelism for three networks."""
    model = chain_graph(num_layers=4, width=4096, batch_size=1024)
    for rate in (10, 25, 100):
        cluster = parse_cluster(LAB.format(rate=rate), Path("lab.yaml"))
        plan = heterog.plan(model, cluster, method="ev_ar", budget="20e")
        assert plan.step_time_s is not None
        print(f"{rate} Gbit/s: {1e3 * plan.step_time_s:.1f} ms")


if __name__ == "__main__":
    main()
