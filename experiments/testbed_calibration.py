"""Testbeds with calibrations of their own, for the experiments that run on them."""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from heterog.cluster import Cluster
from heterog.pricing.calibration import calibrate
from heterog.pricing.measurements import Measurements
from heterog.runtime.measure.profiler import profile_cluster
from heterog.runtime.ranks.testbed import load_testbed

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


def add_testbeds(
    parser: argparse.ArgumentParser, testbeds: Iterable[str], models: Iterable[str]
) -> None:
    """Arguments of a script that measures models on testbeds, on ranks that it starts itself."""
    parser.add_argument("--testbeds", default=",".join(testbeds))
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--folder", default="", help="keeps calibrations here, and uses old ones")
    parser.add_argument("--rank-folder", default="", help=argparse.SUPPRESS)


def testbeds_and_models(asked: argparse.Namespace) -> Iterator[tuple[Cluster, str]]:
    """Every testbed, calibrated, with every model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(asked.folder or scratch)
        for testbed in asked.testbeds.split(","):
            cluster = calibrated(testbed, folder)
            for model in asked.models.split(","):
                yield cluster, model
