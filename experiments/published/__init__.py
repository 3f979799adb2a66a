"""Training runs that others published, as models, clusters and strategies of heterog.

``models`` are captured, never run. ``runs`` reads vTrain's and Sailor's files, ``mpt`` MosaicML's;
``hosts`` makes their clusters.
"""
