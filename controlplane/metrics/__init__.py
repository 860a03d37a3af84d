"""Prometheus metrics of the control plane, and its logging."""
