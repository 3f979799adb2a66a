"""Gymnasium environments around the simulator.

Importing this package registers them, as Gymnasium asks of packages: after
``import heterog.envs``, ``gymnasium.make("heterog/Strategy-v1")`` works. It is the one import of
HeteroG that does something.

- ``pair`` is a model on a cluster as policies see it: ``candidates`` to choose from, an
  ``observation``, a ``reward``, masks of fitting candidates while rows are filled (``filling``),
  and scores by the ``coarse`` evaluator on tables that ``merging`` has made shorter.
- ``strategy_env`` has the two environments of strategies, ``improve_env`` the environment of plans
  improved by moves, ``job_partition`` the environment of arriving jobs, ``spaces`` their padded
  arrays; ``registration`` registers them with Gymnasium.
- ``clusters`` generates clusters, ``toy`` is a small pair, ``conformance`` checks rewards.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.envs")

from heterog.envs.registration import register_envs  # noqa: E402

register_envs()
