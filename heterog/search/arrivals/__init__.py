"""Jobs that arrive at a cluster: how many devices each gets, and which are turned away.

The problem and its first simulator are those of PAC-ML (Parsonson et al., arXiv 2301.13799).
``ramp`` is its network, ``profiled`` its jobs and users. ``queueing`` simulates arrivals on any
cluster and has the baseline rules. ``evaluated`` prices jobs on unequal GPUs, and ``jobs_file`` is
the format that ``heterog schedule`` reads.
"""
