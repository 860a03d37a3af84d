"""The control plane: observers write facts, one pure function decides, the xDS server publishes."""
