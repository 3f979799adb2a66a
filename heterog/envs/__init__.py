"""Gymnasium environments around the simulator.

Importing this package registers them, as Gymnasium asks of packages: after
``import heterog.envs``, ``gymnasium.make("heterog/Strategy-v1")`` works. It is the one import of
HeteroG that does something.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.envs")

from heterog.envs.registration import register_envs  # noqa: E402

register_envs()
