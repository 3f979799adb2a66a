"""Runs plans on real devices.

- ``request`` says what to run, ``launch`` starts ``ranks``, ``rank`` is what one does.
  ``accelerators`` knows kinds of devices.
- ``deploy`` makes a ``step`` of a plan and a workload. ``checkpoint`` keeps it under any plan.
- ``measure`` times and describes what there is. ``batch_norm`` goes with the next release.
"""
