"""CPU profiles with perf: flame graphs and `docs/internals/profiles.md`."""
