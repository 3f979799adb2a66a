"""The keeper of this host, for ranks that torchrun restarts after every loss.

It belongs to torchrun's agent: it is started by the first rank that asks, survives the ranks, and
ends when the agent does. A private folder, which the keeper removes at its end, says to the ranks
that come later where it listens.
"""

import json
import os
import socket
import tempfile
from dataclasses import asdict
from pathlib import Path

from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.healing.keepers import Keeper, KeeperPlace, start_keeper
from heterog.healing.wire import WireError

_LOOPBACK = "127.0.0.1"


def agent_pid() -> int:
    """Id of the process that restarts ranks: torchrun's agent; without one, this process."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def near_keeper(host: int) -> KeeperPlace:
    """Find the keeper of this host; starts it if there is none.

    One rank of each host calls it.

    Args:
        host: Number of this host within the job.

    Raises:
        HeterogError: somebody else made the folder, or the keeper does not start.
    """
    pid = agent_pid()
    folder = Path(tempfile.gettempdir()) / f"heterog-keeper-{os.getuid()}-{pid}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HeterogError(
            f"{folder} belongs to somebody else, or others may read it; remove it, or set TMPDIR "
            "to a folder of your own."
        )
    file = folder / "place.json"
    if file.exists():
        place = KeeperPlace(**(json.loads(file.read_text()) | {"host": host}))
        try:
            Keeper(place).close()
        except (WireError, OSError):
            pass  # it was killed
        else:
            return place
    _, place = start_keeper(host, pid=pid, address=_own_address(), folder=str(folder))
    write_atomically(file, json.dumps(asdict(place)).encode())
    file.chmod(0o600)
    return place


def _own_address() -> str:
    """The address of this host that the others reach; loopback if the job has one host."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) <= 1 or "MASTER_ADDR" not in os.environ:
        return _LOOPBACK
    family, _, _, _, place = socket.getaddrinfo(
        os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # nothing is sent: it only chooses the way
        return str(probe.getsockname()[0])
