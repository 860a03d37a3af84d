"""How settings get from a file and the environment into `controlplane.config`, and how they are explained."""
