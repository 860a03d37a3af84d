"""Node metrics (CPU, memory, PD and TiKV failures), from the nodes' `/metrics` or from Prometheus."""
