"""Discovery of nodes: from PD's etcd and the settings, with DNS resolution."""
