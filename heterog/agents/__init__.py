"""Planners that learn."""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.agents")
