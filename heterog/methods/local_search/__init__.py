"""Simulated annealing over all decisions of a strategy.

``planner`` is the method, ``neighbours`` its moves (``group_rules`` those of teams),
``plan_moves`` those of whole plans, ``move_features`` what a policy sees of them.
"""
