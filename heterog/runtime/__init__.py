"""Runs plans on real devices.

- ``request`` is a run as a value, ``launch`` starts ``ranks``, ``rank`` is the process of one.
  ``accelerators`` knows kinds of devices.
- ``deploy`` makes a ``step`` of a plan and a workload. ``checkpoint`` saves it for any plan.
- ``lookout`` looks whether a rank's loop stands, and where.
- ``measure`` times ops and links and describes machines.
"""
