"""Observers: they collect facts from PD, the nodes and the Envoys."""
