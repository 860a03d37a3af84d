"""Benchmarks of the control plane: speed and cost of decisions and publishing."""
