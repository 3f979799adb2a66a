"""The command torchrun, with what ranks import: ``--start-method fork`` forks them off it."""

import torch._dynamo  # noqa: F401  (every optimizer imports it)
from torch.distributed.run import main

import heterog.healing.loop
import heterog.healing.on_torchrun
import heterog.healing.planning  # noqa: F401

if __name__ == "__main__":
    main()
