"""Compares MySQL proxies under the same load: CPU per query, latency, memory.

`workloads` says what clients do, `contenders` starts the proxies, `slices` measures them in turn, `ratios`
turns the measurements into intervals and verdicts, `command` is `tidevoy bench proxies`, `against` is
`tidevoy bench against`.
"""
