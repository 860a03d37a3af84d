"""Observers collect facts from PD, from the nodes and from the Envoys."""
