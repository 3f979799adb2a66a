"""Predicts step time and memory of a program."""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.simulator")
