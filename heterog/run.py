"""Runs a rank of a plan, on every host of its cluster in any order.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m heterog.run plan.json

A machine's place in the plan is found by its devices; see ``runtime.ranks.host_places``. In place
of a plan it takes a run file, too; see ``runtime.request``.
"""

from heterog.runtime.rank import main

if __name__ == "__main__":
    main()
