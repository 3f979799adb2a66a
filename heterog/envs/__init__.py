"""Gymnasium environments around the simulator.

Importing this package registers them, as Gymnasium asks of packages: after
``import heterog.envs``, ``gymnasium.make("heterog/Strategy-v1")`` works. It is the one import of
HeteroG that does something.

- ``pair`` is a model on a cluster as a policy meets it: ``candidates`` to choose from, an
  ``observation``, a ``reward``, what fits while rows are filled (``filling``), and scores by the
  ``coarse`` evaluator on tables that ``merging`` has made shorter.
- ``strategy_env`` has the two environments of strategies, ``improve_env`` that of plans
  improved by moves, ``job_partition`` that of arriving jobs,
  ``spaces`` their padded arrays; ``registration`` tells Gymnasium.
- ``clusters`` are generated, ``toy`` is a small pair, ``conformance`` checks rewards.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.envs")

from heterog.envs.registration import register_envs  # noqa: E402

register_envs()
