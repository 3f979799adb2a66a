"""Jobs that go on when a rank is lost, comes back, or becomes slow.

Ranks die with the state that they hold, so the newest snapshots of it lie in their hosts' memory,
as files. When a rank is lost, what is left gets a new plan, every new rank takes what it needs of
the newest complete snapshot, and training goes on at the step after it. No socket is opened for
that: ranks themselves carry parts from host to host.

- ``job`` runs a plan and heals it (``heterog run`` if asked to), with the settings of ``options``.
  Its ``crew`` runs ranks on hosts, which also keep snapshots: on one in its own process, or
  ``on_ray`` on an actor on each node of a Ray cluster, where another actor leads the job.
- ``rank`` is what each rank does. It gets its assignment and writes its journal by the files of
  ``record``, which also has what they come to. It writes ``snapshots`` and copies them to other
  hosts; ``shelf`` has their parts as files, and reads them.
- ``steering`` decides about changes of plan. It asks ``planning``, a process (``service``) that
  makes plans, by the questions of ``choices``, where also is how a change is measured. ``costs``
  has how long devices compute, what steps cost where they are slow, and what a change costs.
  ``checkpoints`` are written beside training, by a process of their own.
- ``on_torchrun`` is a plan whose ranks torchrun starts again and again. ``loop`` is for loops with
  a ``Balancer``, and ``elastic`` what both need. ``agent`` starts both (``heterog.heal``).
"""
