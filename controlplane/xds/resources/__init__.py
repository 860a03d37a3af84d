"""The xDS resources of a plan: cluster, endpoints, listeners, and the module's configuration."""
