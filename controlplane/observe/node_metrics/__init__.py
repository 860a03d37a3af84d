"""Node metrics (CPU, memory, PD and TiKV failures), read from the nodes or from Prometheus."""
