"""Benchmarks of Tidevoy, each with a target: `tidevoy bench`, `make bench`."""
