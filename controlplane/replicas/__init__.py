"""Replicas of the control plane: leader election, the shared plan, and the feeds between replicas."""
