"""Where the CPU time goes: perf, flame graphs, `docs/internals/profiles.md`."""
