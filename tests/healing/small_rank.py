"""A rank without a model: meets the others, says what it sees, and ends when it is asked to."""

import json
import os
import sys
import time
from pathlib import Path


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    heartbeat, port = Path(os.environ["HETEROG_HEARTBEAT"]), Path(os.environ["HETEROG_PORT_FILE"])
    run_file, assignment, events, stop = map(Path, arguments)
    wait_for(assignment)
    what = json.loads(assignment.read_text())
    if rank == 0:  # as ``heterog.runtime.rank`` does, so that nobody reads half of it
        port.with_suffix(".new").write_text("4321")
        port.with_suffix(".new").rename(port)
    wait_for(port)
    seen = {
        "local": [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]],
        "meet": [os.environ["MASTER_ADDR"], port.read_text(), os.environ["WORLD_SIZE"]],
        "plan": Path(what["plan"]).read_text(),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }
    (Path(os.environ["SMALL_OUT"]) / f"{what['generation']}.{rank}.json").write_text(
        json.dumps(seen)
    )
    if rank == 0:
        with events.open("a") as journal:
            event = {"event": "step", "at_s": time.monotonic(), "step": 1}
            journal.write(json.dumps(event) + "\n")
    heartbeat.write_text("step 1 of 1")
    wait_for(stop)
    if json.loads(run_file.read_text())["model"] == "fails" and rank == 1:
        sys.exit("heterog: rank 1: it has failed")


if __name__ == "__main__":
    main(sys.argv[1:])
