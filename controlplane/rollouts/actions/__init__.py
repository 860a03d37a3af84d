"""What a rollout runs on a drained node: commands, webhooks, login probes."""
