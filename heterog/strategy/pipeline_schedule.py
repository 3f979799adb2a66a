"""The old name of ``heterog.strategy.schedules``, for one release more."""

from heterog.errors import moved

moved(__name__, "heterog.strategy.schedules")
