"""Judges comparisons of replays: is a new server as good as an old one? Pure functions."""
