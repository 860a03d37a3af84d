"""Benchmark of how evenly balancers distribute sessions, in simulated fleets with the real decisions."""
