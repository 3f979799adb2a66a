"""``heterog models`` and ``heterog clusters``: what is built in."""

from heterog.cli.common import JsonOption, out, print_json


def models(as_json: JsonOption = False) -> None:
    """List the built-in models."""
    from heterog.report.tables import models_table
    from heterog.zoo import entry, names

    entries = [entry(name) for name in names()]
    if as_json:
        print_json(
            [
                {
                    "name": each.name,
                    "family": each.family,
                    "default_batch_size": each.default_batch_size,
                    "num_parameters": each.num_parameters,
                    "description": each.description,
                }
                for each in entries
            ]
        )
    else:
        out.print(models_table(entries))


def clusters(as_json: JsonOption = False) -> None:
    """List the built-in clusters."""
    from heterog.cluster import Cluster, preset_names
    from heterog.report.tables import clusters_table

    presets = [Cluster.load(name) for name in preset_names()]
    if as_json:
        print_json([cluster.to_dict() for cluster in presets])
    else:
        out.print(clusters_table(presets))
