"""Pipette: uniform layouts and the order of hosts for links that are not equal (DATE 2024).

``layouts`` lists the uniform layouts, ``latency`` has the paper's six models of a step,
``communication`` the cost of an order of hosts, ``annealing`` the search for an order, and
``planner`` is the method.
"""

from heterog.methods.pipette.annealing import Annealed, anneal
from heterog.methods.pipette.communication import Communication, HostRates, Pricing, Traffic
from heterog.methods.pipette.latency import UniformCosts, Variant, latency_s

__all__ = [
    "Annealed",
    "Communication",
    "HostRates",
    "Pricing",
    "Traffic",
    "UniformCosts",
    "Variant",
    "anneal",
    "latency_s",
]
