"""Where intents, the plan and rollouts are saved: a directory, or PD's etcd."""
