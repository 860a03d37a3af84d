"""How fast, and at what cost, the control plane decides and publishes."""
