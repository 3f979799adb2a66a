"""Settings that every test shares."""

import os
import signal

# Before torch is imported: workers run beside each other, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Whoever started the tests may ignore these (nohup, a shell's background); tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadlines: a busy machine is no failure, and speed is measured in benchmarks/.
settings.register_profile("heterog", deadline=None, derandomize=True)
settings.load_profile("heterog")
