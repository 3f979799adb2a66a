"""Testbeds with calibrations of their own, for the experiments that run on them."""

from dataclasses import replace
from pathlib import Path

from heterog.cluster import Cluster
from heterog.runtime.profiler import profile_cluster
from heterog.runtime.testbed import load_testbed
from heterog.simulator.calibration import calibrate
from heterog.simulator.measurements import Measurements

WORKLOADS = Path(__file__).with_name("calibration_workloads.py")
CALIBRATED_ON = ("mlp_small", "mlp_wide", "vgg_narrow", "vgg_wide", "text_small", "text_wide")


def calibrated(testbed: str, folder: Path) -> Cluster:
    """The testbed's cluster with a calibration of its own; measured once per folder.

    Ops are not measured again on types of devices that another testbed has had measured.
    """
    cluster = load_testbed(testbed)
    path = folder / f"{Path(testbed).stem}.calibration.json"
    kept = folder / f"{Path(testbed).stem}.measurements.json"
    if not path.exists():
        others = [Measurements.load(each) for each in sorted(folder.glob("*.measurements.json"))]
        types = {of_type.name for of_type in cluster.device_types}
        ops = tuple(row for part in others for row in part.ops if row.device_type in types)
        is_known = types <= {row.device_type for row in ops}
        if kept.exists():
            measured = Measurements.load(kept)
        else:
            sources = [f"{WORKLOADS}:{name}" for name in CALIBRATED_ON]
            measured = profile_cluster(
                [] if is_known else sources, cluster, folder / f"{Path(testbed).stem}.journal"
            )
            measured.save(kept)
        if not measured.ops:
            measured = replace(measured, ops=ops)
        calibrate(measured, cluster, name=f"calibrated on {testbed}").save(path)
    return replace(cluster, calibration=str(path))
