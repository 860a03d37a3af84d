"""CPU, memory and health metrics of nodes, from their `/metrics` or from Prometheus."""
