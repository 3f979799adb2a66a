"""Jobs that arrive at a cluster: how many devices each gets, and which are turned away.

The question and its first simulator are those of PAC-ML (Parsonson et al., arXiv 2301.13799).
``ramp`` is its network, ``profiled`` its jobs, ``deadlines`` its users; ``queueing`` simulates
arrivals on any cluster, ``rules`` are the baselines, ``evaluated`` are jobs on unequal GPUs, and
``jobs_file`` is what ``heterog schedule`` reads.
"""
