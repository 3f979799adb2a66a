"""Gymnasium environments around the simulator."""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.envs")
