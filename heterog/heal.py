"""Runs a rank of a plan that heals, under torchrun.

    torchrun --nnodes 2:3 --nproc-per-node 4 --max-restarts 100 ... -m heterog.heal plan.json

Like ``heterog.run``, but when hosts are lost, the remaining ones continue with another plan. It
takes a run file, too, in which ``heal`` has fields of ``healing.options.HealOptions``.
"""

from heterog.healing.on_torchrun import main

if __name__ == "__main__":
    main()
