"""Burst parallelism: how many devices each layer of a fork-join graph gets (DeepPool).

``search`` reads chains and branches out of a layer graph and is the dynamic program; ``planner``
is the method.
"""
