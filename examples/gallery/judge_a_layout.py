"""Judge the layout that you run today beside what heterog finds."""

import heterog
from heterog.envs.toy import chain_graph


def main() -> None:
    """Compare a pipeline of four stages with a plan."""
    cluster = heterog.Cluster.load("rtx_mixed")
    model = chain_graph(num_layers=8, width=4096, batch_size=512)
    num_devices = cluster.num_devices
    today = heterog.layout(model, cluster, pp=4, dp=num_devices // 4, num_micro=8)
    found = heterog.plan(model, cluster, method=["tuned_uniform", "pipeline"], budget="200e")
    assert today.step_time_s is not None
    assert found.step_time_s is not None
    print(f"today: {1e3 * today.step_time_s:.2f} ms")
    print(f"found by {found.method}: {1e3 * found.step_time_s:.2f} ms")
    print(f"no plan can take less than {1e3 * found.lower_bound_s:.2f} ms")


if __name__ == "__main__":
    main()
