"""What ranks need that torchrun starts again and again, plans and loops alike."""

import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heterog.errors import HeterogError, InputFileError
from heterog.runtime.launch import remove_after
from heterog.runtime.ranks.forks import fields_of_process
from heterog.runtime.ranks.links import CUT_S, end_connections, own_addresses
from heterog.runtime.step.collectives import gather_texts

_LOG = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Seconds for which a rank that is told to end may go on with its step; torchrun waits for 30."""
ROUND = "HETEROG_ROUND"
"""Variable with the number of times that hosts have met before; absent under plain torchrun."""
ERROR = "error"
"""File of a host with the error of a rank for which its agent ends the job."""
_OF_HOST = OSError, InputFileError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError
"""Errors for which a host may be at fault: its files, its memory or its accelerator."""
_WORDS_OF_HOST = "DataLoader worker (pid", "DefaultCPUAllocator"
"""Words of torch's RuntimeErrors of a worker that was killed, and of no memory."""
_LOOK_S = 0.25
"""Seconds between looks for machines that are cut off."""


def on_sigterm(leave: Callable[[], object], seconds: float = LEAVE_S) -> None:
    """Let SIGTERM end this rank after its step, or after so long.

    Args:
        leave: Called then; asks for the end after the step.
        seconds: Longest wait for that.
    """

    def told(*_: object) -> None:
        leave()
        waiting = threading.Timer(seconds, exit_now)
        waiting.daemon = True
        waiting.start()

    signal.signal(signal.SIGTERM, told)


def any_rank(*values: bool) -> list[bool]:
    """Which of some values any rank has; all ranks call it, and wait for each other."""
    said = torch.tensor([*map(int, values)])
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return [bool(each) for each in said.tolist()]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What JSON makes of a value of each rank; see ``gather_texts``."""
    return [json.loads(each) for each in gather_texts(json.dumps(value), group)]


def set_silence(seconds: float, groups: Iterable[dist.ProcessGroup | None] = (None,)) -> None:
    """Set the timeout of collectives, by default those of all ranks.

    There is no public function for it.
    """
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def end_cut_links() -> None:
    """End connections with machines of ranks that are cut off, from now on; all ranks call it.

    Whoever waits for such a machine then fails as if it had ended.
    """
    own = own_addresses()
    machines = {each for addresses in gather([*own]) for each in addresses}

    def watch(left: set[str]) -> None:
        while left:
            time.sleep(_LOOK_S)
            for each in sorted(cut := end_connections(left)):
                _LOG.warning("%s is cut off: nothing gets there in %g s", each, CUT_S)
            left -= cut

    threading.Thread(target=watch, args=(machines - own,), daemon=True).start()


def run_script(path: str, *arguments: str) -> None:
    """Be a rank that runs a script, for torchrun's agent; an error ends it as soon as it is told.

    Taking Python down takes seconds with all that is imported, for which torchrun would wait.
    """
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        traceback.print_exc()
        end_job(error)
        exit_now()


def end_job(error: BaseException) -> None:
    """Let torchrun's agent end, which would start the same again, unless another rank was lost.

    The agent of ``heterog.heal`` ends the job on all hosts. But if this host may be at fault, its
    files, memory or accelerator, it alone leaves, as it does under the command torchrun.
    """
    from heterog.runtime.rank import is_of_another  # a second on every rank of a loop

    if is_of_another(error) or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    is_of_host = isinstance(error, _OF_HOST) or any(word in str(error) for word in _WORDS_OF_HOST)
    if is_of_host or ROUND not in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)
        return
    kind = "" if isinstance(error, HeterogError) else f"{type(error).__name__}: "
    (folder_of_host() / ERROR).write_text(f"rank {os.environ['RANK']}: {kind}{error}")


def say(line: str) -> None:
    """Tell whoever watches this rank."""
    print(f"heterog: {line}", file=sys.stderr, flush=True)


def exit_now() -> None:
    """End this rank at once."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def has_met() -> bool:
    """Whether hosts of this job have met before, as far as torchrun's agent knows."""
    return os.environ.get(ROUND, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0"


def path_of_host() -> Path:
    """Path of the folder of this host's snapshots, for its ranks and their agent.

    Its name has the agent's id and when it began: in containers many agents have the same id, and
    the folder of one that could not be removed would be taken for that of the next.
    """
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    begun = fields_of_process(pid)[19] if sys.platform == "linux" else "0"
    return Path(tempfile.gettempdir()) / f"heterog-loop-{os.getuid()}-{pid}-{begun}"


def folder_of_host() -> Path:
    """The folder of this host's snapshots, which outlives its ranks and ends with their agent.

    Raises:
        HeterogError: somebody else made it.
    """
    folder = path_of_host()
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    else:
        agent = folder.name.split("-")[-2]
        remove_after(f"while kill -0 {agent}; do sleep 1; done", str(folder))
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HeterogError(f"{folder} belongs to somebody else, or others may read it; remove it.")
    return folder
