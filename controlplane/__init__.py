"""The control plane: observers collect facts, a pure function plans, the xDS server publishes the plan."""
