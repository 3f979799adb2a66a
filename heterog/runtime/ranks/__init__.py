"""Ranks as processes, of one machine or several.

``forks`` forks them, ``watching`` watches them, ``on_ray`` starts them on a Ray cluster
(``ray_nodes`` lists the devices of its nodes), and ``host_places`` gives ranks under torchrun
their devices in the plan. A ``place`` is where ranks run, such as a ``testbed``, which limits
their CPUs and links (``emulated_network``). ``links`` finds machines that are cut off.
``background`` is a job beside a step.
"""
