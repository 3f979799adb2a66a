"""What holds for a cluster as a whole."""

from collections import Counter
from collections.abc import Sequence

from heterog.cluster.checks import check_not_negative, check_positive
from heterog.cluster.hardware import Device, DeviceType, Host, PairLimit
from heterog.errors import ClusterError

MAX_DEVICES = 2048
"""Limit because channels are numbered by pairs of devices: there would be four million."""


def check_cluster(cluster: str, hosts: Sequence[Host], devices: Sequence[Device]) -> None:
    """Check that devices have names of their own and are listed host by host, on every host.

    Raises:
        ClusterError: They are not.
    """
    if len(devices) > MAX_DEVICES:
        raise ClusterError(
            f"cluster '{cluster}' has {len(devices):,} devices; at most "
            f"{MAX_DEVICES:,} are planned for."
        )
    if not devices:
        raise ClusterError(f"cluster '{cluster}' has no device; it needs at least one.")
    _check_names(cluster, "hosts", [host.name for host in hosts])
    _check_names(cluster, "devices", [device.name for device in devices])
    _check_places(cluster, hosts, devices)
    by_name: dict[str, DeviceType] = {}
    for device in devices:
        if by_name.setdefault(device.type.name, device.type) != device.type:
            raise ClusterError(
                f"device '{device.name}' has a type named '{device.type.name}' with other numbers "
                "than an earlier one of that name; give it another name."
            )


def _check_names(cluster: str, what: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ClusterError(
                f"cluster '{cluster}' has {count} {what} named '{name}'; give each its own name."
            )


def _check_places(cluster: str, hosts: Sequence[Host], devices: Sequence[Device]) -> None:
    previous = 0
    for device in devices:
        if not 0 <= device.host_index < len(hosts):
            raise ClusterError(
                f"device '{device.name}' is on host number {device.host_index} but cluster "
                f"'{cluster}' has hosts 0 to {len(hosts) - 1}."
            )
        if device.host_index < previous:
            raise ClusterError(
                f"device '{device.name}' of host '{hosts[device.host_index].name}' comes "
                f"after devices of host '{hosts[previous].name}'; list devices host by "
                "host, in the order of the hosts."
            )
        previous = device.host_index
    used = {device.host_index for device in devices}
    for index, host in enumerate(hosts):
        if index not in used:
            raise ClusterError(f"host '{host.name}' has no device; add one or remove the host.")


MAX_PAIRS = 128 * 127
"""Limit: a measured matrix of 128 hosts; each entry is one link in the simulation."""


def check_pairs(cluster: str, hosts: Sequence[Host], pairs: Sequence[PairLimit]) -> None:
    """Check that limits between hosts name hosts that there are, on one side each.

    Raises:
        ClusterError: They do not.
    """
    where = f"of cluster '{cluster}'"
    if len(pairs) > MAX_PAIRS:
        raise ClusterError(
            f"{len(pairs):,} limits between hosts {where} are more than the {MAX_PAIRS:,} "
            "of a matrix for 128 hosts; leave out pairs that are as fast as their NICs."
        )
    for number, limit in enumerate(pairs):
        what = f"limit {number} between hosts {where}"
        for side in (limit.sources, limit.targets):
            if not side or len(set(side)) < len(side):
                raise ClusterError(f"{what} names no host, or one twice, on one of its sides.")
            if not all(0 <= host < len(hosts) for host in side):
                raise ClusterError(
                    f"{what} names a host that there is not; they are 0 to {len(hosts) - 1}."
                )
        if both := set(limit.sources) & set(limit.targets):
            name = hosts[min(both)].name
            raise ClusterError(f"{what} has host '{name}' on both sides; it can be on one.")
        check_positive(limit.bandwidth_bytes_per_s, f"bandwidth of {what}")
        check_not_negative(limit.latency_s, f"latency of {what}")
