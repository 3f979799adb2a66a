"""Agents: policies that learn to propose strategies, and the methods that use them.

- ``encoder`` and ``policy`` are the network, ``graph_data`` its input, ``config`` its sizes and
  the settings of training, ``checkpoint`` a policy on disk, ``hub`` a folder to share, ``shipped``
  the policies of the package.
- ``training`` trains on many pairs and validates: ``sources`` gives pairs, a ``learner`` improves
  a policy on them, by gradients or by algorithms of stable-baselines3 (``sb3``). Losses are in
  ``imitation`` (of rows that ``elites`` finds) and ``reinforce``. ``finetune`` learns on one pair,
  ``evaluation`` compares.
- ``proposals`` are a policy's answer: ``ways`` draws rows, ``stages`` makes pipelines near them,
  ``op_level`` scores the best at the op level, ``finishing`` adds teams and schedules.
- ``improver`` scores the moves of a local search, ``move_imitation`` trains it.
- ``planners`` are the methods ``agent`` and ``agent+search``; ``job_ppo`` learns for arriving
  jobs; ``conformance`` checks encoders, ``benchmark`` compares methods on suites.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.agents")
