"""Comparison of MySQL proxies under the same load: CPU per query, latency, memory.

`workloads` defines what clients do, `contenders` starts the proxies, `interleaving` measures them in
turn, `significance` computes intervals and verdicts, `command` implements `tidevoy bench proxies`, and
`build_comparison` implements `tidevoy bench against`.
"""
