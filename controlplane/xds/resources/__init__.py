"""Builds the xDS resources of a plan: clusters, endpoints, listeners and live configurations."""
