"""Ranks as processes, of one machine or several.

``forks`` forks them, ``watching`` watches them, ``on_ray`` starts them on a Ray cluster
(``ray_nodes`` says what its nodes have), and ``host_places`` finds whose ranks torchrun's are; a
``place`` is where they run, such as a ``testbed``, which limits their CPUs and links
(``emulated_network``). ``links`` says which machines are cut off. ``background`` is a job beside a
step.
"""
