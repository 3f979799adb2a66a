"""Trains on a host of a job that goes on when hosts are lost; the same on every host.

    python -m heterog.heal --nnodes 2:3 --nproc-per-node 4 --rdzv-endpoint HOST:29400 plan.json

It is torchrun's agent, and under torchrun a rank. Instead of a plan it takes a run file, in which
``heal`` has fields of ``healing.options.HealOptions``, or a script with a ``HealingLoop``.
"""

import os
import sys

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from heterog.healing.on_torchrun import main

        main()
    else:
        from heterog.healing.agent import run_agent

        run_agent(sys.argv[1:], __file__)
