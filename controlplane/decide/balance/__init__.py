"""Distribute sessions over the nodes in service: weights, zones, and migrations that even out the load."""
