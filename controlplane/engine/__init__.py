"""Runs the control plane: plans when facts or intents change, then publishes and saves the plan."""
