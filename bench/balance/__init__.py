"""Benchmark of how evenly balancers distribute sessions, in simulated fleets with the real decisions."""

from bench.balance.benchmark import METHOD, measure

__all__ = ["METHOD", "measure"]
