"""Settings that every test shares."""

import os

# Before torch is imported: workers run beside each other, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No deadlines: a busy machine is no failure, and speed is measured in benchmarks/.
settings.register_profile("heterog", deadline=None, derandomize=True)
settings.load_profile("heterog")
