"""Comparison of MySQL proxies under the same load: CPU per query, latency, memory.

`workloads` defines what clients do, `contenders` starts the proxies, `interleaving` measures them in turns,
`significance` computes intervals and verdicts, `command` is `tidevoy bench proxies`, `build_comparison` is
`tidevoy bench against`.
"""
