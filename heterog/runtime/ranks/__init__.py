"""Ranks as processes of one machine.

``forks`` forks them, ``watching`` watches them; a ``place`` is where they run, such as a
``testbed``, which limits their CPUs and links (``emulated_network``). ``background`` is a job
beside a step.
"""
