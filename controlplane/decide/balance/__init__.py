"""Distribute sessions over the nodes in service by weights, zones and migrations."""
