"""The old name of ``heterog.balance.sampler``, for one release more."""

from heterog.errors import moved

moved(__name__, "heterog.balance.sampler")
