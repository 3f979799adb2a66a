"""Built-in things: ``heterog models``, ``clusters``, ``devices``, ``links`` and ``methods``."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from heterog.cli.common import JsonOption, out, print_json, print_result

if TYPE_CHECKING:
    from heterog.cluster.catalog import ListedType


def models(as_json: JsonOption = False) -> None:
    """List the built-in models."""
    from heterog.report.tables import models_table
    from heterog.zoo import entry, names

    entries = [entry(name) for name in names()]
    print_result(as_json, _fields(entries, *_OF_A_MODEL), models_table(entries))


_OF_A_MODEL = ("name", "family", "default_batch_size", "num_parameters", "description")


def _fields(rows: Iterable[object], *names: str) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in names} for row in rows]


def clusters(as_json: JsonOption = False) -> None:
    """List the built-in clusters and testbeds."""
    from heterog.cluster import Cluster, preset_names
    from heterog.report.tables import clusters_table
    from heterog.runtime.ranks.testbed import load_testbed, shipped_testbeds

    presets = [Cluster.load(name) for name in preset_names()]
    testbeds = [load_testbed(name) for name in shipped_testbeds()]
    print_result(
        as_json,
        [cluster.to_dict() for cluster in (*presets, *testbeds)],
        clusters_table(presets),
        clusters_table(testbeds, title="testbeds: shaped ranks on this machine (Linux)"),
    )


def devices(as_json: JsonOption = False) -> None:
    """List the device types, with numbers and data sheets."""
    from heterog.cluster.catalog import listed_types
    from heterog.report.tables import devices_table, sources_text

    listed = listed_types()
    if as_json:
        print_json([_device(each) for each in listed])
        return
    out.print(devices_table(listed))
    out.print(sources_text([each.type.source for each in listed]), soft_wrap=False)


def _device(each: "ListedType") -> dict[str, Any]:
    return {
        "name": each.type.name,
        "vendor": each.vendor,
        "memory_bytes": each.type.memory_bytes,
        "memory_bandwidth_bytes_per_s": each.type.memory_bandwidth_bytes_per_s,
        "peak_flops_per_s": dict(each.type.peak_flops_per_s),
        "tf32_flops_per_s": each.tf32_flops_per_s,
        "source": each.type.source,
    }


def links(as_json: JsonOption = False) -> None:
    """List the links and networks that clusters can name."""
    from heterog.cluster.catalog import link_kinds, network_kinds
    from heterog.report.tables import links_table, networks_table, sources_text

    inner, networks = link_kinds(), network_kinds()
    if as_json:
        print_json(
            {
                "intra": [
                    {
                        "name": each.name,
                        "aliases": list(each.aliases),
                        "bandwidth_bytes_per_s": each.link.bandwidth_bytes_per_s,
                        "sheet_bytes_per_s": each.sheet_bytes_per_s,
                        "latency_s": each.link.latency_s,
                        "source": each.sheet,
                        "share": each.share,
                    }
                    for each in inner
                ],
                "nic": [
                    {
                        "name": each.name,
                        "aliases": list(each.aliases),
                        "line_rate_bytes_per_s": each.line_rate_bytes_per_s,
                        "source": each.sheet,
                    }
                    for each in networks
                ],
            }
        )
        return
    out.print(links_table(inner))
    out.print(sources_text([f"{each.sheet}; used: {each.share}" for each in inner]))
    out.print(networks_table(networks))


def methods(as_json: JsonOption = False) -> None:
    """List the methods: what each does and needs."""
    from heterog.methods.built_in import METHODS
    from heterog.report.tables import planners_table

    document = _fields(METHODS, "name", "stage", "what", "needs")
    print_result(as_json, document, planners_table(METHODS))
