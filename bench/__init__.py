"""Measurements of Tidevoy, each with its target: `tidevoy bench`, `make bench`."""
