"""Gymnasium environments around the simulator.

Importing this package registers them, as Gymnasium asks of packages: after
``import heterog.envs``, ``gymnasium.make("heterog/Strategy-v1")`` works. It is the one import of
HeteroG that does something.
"""

from heterog.envs.registration import register_envs

register_envs()
