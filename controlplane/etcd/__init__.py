"""A client of etcd's v3 API, as PD embeds it: several members, TLS, watches that say when they are lost."""
