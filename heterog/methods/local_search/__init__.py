"""Simulated annealing over all decisions of a strategy.

``planner`` is the method, ``neighbours`` its moves, ``group_rules`` the op rules in them,
``plan_moves`` the moves of whole plans, ``move_features`` what a policy sees of a move.
"""
