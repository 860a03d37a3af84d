"""Benchmark of session migration: its cost, and its effect on clients."""
