"""Pipette: uniform layouts and the order of hosts for links that are not equal (DATE 2024).

``communication`` has the paper's six models of a step and the cost of an order of hosts,
with the search for one, and ``planner`` lists the layouts and is the method.
"""
