"""Prometheus metrics and logging of the control plane."""
