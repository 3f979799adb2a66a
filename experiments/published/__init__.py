"""Training runs that others published, as models, clusters and strategies of heterog.

``models`` are captured, never run. ``runs`` reads vTrain's and Sailor's files, ``mpt`` MosaicML's,
``nanotron`` the sweep of thousands of H100, ``megatron_peaks`` Megatron-LM's tests of memory.
``textbook`` knows what a layout costs by formulas alone.
"""
