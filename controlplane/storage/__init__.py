"""Storage of intents, the plan and rollouts: a local directory, or PD's etcd."""
