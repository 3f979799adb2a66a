"""Agents: policies that learn to propose strategies, and the methods that ask them.

- ``encoder`` and ``policy`` are the network, ``graph_data`` its input, ``config`` its sizes and
  the settings of training, ``checkpoint`` a policy on disk, ``hub`` a folder to share, ``shipped``
  those of the package.
- ``training`` learns on many pairs and measures: ``sources`` gives pairs, a ``learner`` improves a
  policy on them, by gradients or by algorithms of stable-baselines3 (``sb3``). Losses are those of
  ``imitation``, of what ``elites`` finds, and ``reinforce``. ``finetune`` learns on one pair,
  ``evaluation`` compares.
- ``proposals`` are what a policy answers: ``ways`` draw rows, ``stages`` make other rows of them,
  ``op_level`` scores the best at the op level, ``finishing`` adds teams and schedules.
- ``drafts`` are whole plans in a few words, which a ``drafter`` draws; ``draft_estimates`` says
  what they are worth, ``beginnings`` tries the most promising.
- ``improver`` scores the moves of a local search, ``move_imitation`` teaches it.
- ``planners`` are the methods ``agent`` and ``agent+search``; ``job_ppo`` learns for arriving
  jobs; ``conformance`` checks encoders, ``benchmark`` compares methods on suites.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.agents")
