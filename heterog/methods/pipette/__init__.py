"""Pipette: uniform layouts, and an order of hosts for unequal links (DATE 2024).

``communication`` has the paper's model of a step, the cost of an order of hosts, and the
search for an order. ``planner`` lists the layouts and is the method.
"""
