"""Could Sailor say a faster plan than the table's? All plans of few stages, by branch and bound.

    python experiments/sailor_bound.py --data DIR --table table.json --stages 3 --json

``table.json`` is what ``sailor_table.py --json`` prints. For each setting, every plan that Sailor
can say with at most so many stages is left out as soon as what it takes at least, without the
update, is not below our plan's time. Where nothing is left but that plan, none is faster.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rows import finish, progress, script_parser
from sailor.exhaustive import Survivor, plans_below
from sailor.inputs import Inputs, read_inputs
from sailor.tables import Tables
from sailor_table import SETTINGS

from heterog.errors import HeterogError

METHOD = "ours, Sailor can say"


def words_of(found: Survivor, tables: Tables) -> str:
    """A plan in a line."""
    bounds = found.stages.bounds
    parts = []
    for index, teams in enumerate(found.stages.teams):
        replicas = [tables.teams[team].replica for team in teams]
        names = " and ".join(f"{each.card} tp{each.tensor}" for each in replicas)
        parts.append(f"{bounds[index + 1] - bounds[index]} layers on {names}")
    return f"{' | '.join(parts)}; {found.num_replicas} replicas of {found.micro_batch}"


def bound_of(row: dict[str, Any], inputs: Inputs, most_stages: int) -> dict[str, Any]:
    """What is left of all plans of a setting."""
    begin = time.monotonic()
    tables = Tables(inputs=inputs, num_gpus=SETTINGS[row["setting"]].num_gpus)
    left = plans_below(tables, row["step_time_s"], most_stages)
    return {
        "setting": row["setting"],
        "ours_s": row["step_time_s"],
        "stages": most_stages,
        "left": [{"at_least_s": each.bound_s, "plan": words_of(each, tables)} for each in left],
        "seconds": time.monotonic() - begin,
    }


def main() -> int:
    """Bound the settings of a table."""
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of Sailor's inputs")
    parser.add_argument("--table", type=Path, required=True, help="output of sailor_table.py")
    parser.add_argument("--only", default="", help="names of settings, separated by semicolons")
    parser.add_argument("--stages", type=int, default=3, help="the most that plans have")
    options = parser.parse_args()
    rows = []
    try:
        inputs = read_inputs(options.data)
        for row in json.loads(options.table.read_text())["rows"]:
            is_wanted = not options.only or row["setting"] in options.only.split(";")
            if row["method"] == METHOD and is_wanted:
                rows.append(bound_of(row, inputs, options.stages))
                progress(json.dumps(rows[-1]))
    except HeterogError as error:
        print(error, file=sys.stderr)
        return 2
    finish(options, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
