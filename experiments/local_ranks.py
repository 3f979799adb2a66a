"""Functions on ranks that meet over gloo on this machine, for experiments without a testbed."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heterog.runtime.rank import end_together


def result_of_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Run a function on some ranks, and hand over what it returned on rank 0, as JSON.

    Args:
        function: Called with the rank and the arguments, in a process of one thread.
        num_ranks: Number of processes.
        arguments: Further arguments of the function.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            multiprocessing.Process(
                target=_serve, args=(rank, num_ranks, folder, function, arguments)
            )
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        return json.loads((folder / "result.json").read_text())


def _serve(
    rank: int,
    num_ranks: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )
    found = function(rank, *arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    end_together()
