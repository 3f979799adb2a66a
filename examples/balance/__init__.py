"""Training scripts with a balancer; ``before`` has them without."""
