"""Jobs that go on when a rank is lost, comes back, or becomes slow.

Ranks die with the state that they hold, so the newest snapshots of it lie in their hosts' memory,
as files. When a rank is lost, what is left gets a new plan, every new rank takes what it needs of
the newest complete snapshot, and training goes on at the step after it. No socket is opened for
that: from node to node Ray carries parts, or under torchrun the ranks themselves.

- ``shelf`` is a host's snapshots and says which is the newest complete one; ``sending`` takes
  them, ``restoring`` reads them.
- ``job`` runs a plan and heals it (``heterog run`` if asked to). Its ``crew`` is this machine, or
  ``ray_crew``, the nodes of a Ray cluster, on each of which an actor of ``ray_host`` runs ranks
  and carries snapshots; ``on_ray`` is the job that leads them. Ranks read what to run in an
  ``assignment`` and write a ``journal``; ``options`` are the settings.
- ``rank`` is what each rank does, ``steering`` decides with the help of ``planning``, a process
  that makes plans (a ``service`` that answers a ``question``); ``slowed`` has clusters with slow
  devices, ``moving`` what it costs to change to a plan, ``busy`` says who is slow, ``trial``
  whether a change pays as measured. ``checkpoints`` are written beside training, by a process of
  their own.
- ``on_torchrun`` is a plan whose ranks torchrun starts again and again (``heterog.heal``); they
  have parts in ``carrying``. ``loop`` is for loops with a ``Balancer``, and ``elastic`` what both
  need.
"""
