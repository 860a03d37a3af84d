"""A client of etcd's gRPC API: requests, watches, leases."""
