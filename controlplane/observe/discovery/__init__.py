"""Which nodes exist: PD's etcd, the settings, DNS."""
