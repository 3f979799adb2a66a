"""The command torchrun, with what ranks load: ``--start-method fork`` forks them off it."""

import sys

import torch._dynamo  # noqa: F401  (every optimizer imports it)
from torch.distributed.run import main

import heterog.healing.loop  # noqa: F401
from heterog.healing.on_torchrun import warm

if __name__ == "__main__":
    warm(sys.argv[-1])
    main()
