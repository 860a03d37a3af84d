"""A private CA in one directory: certificates for the connections between Envoys and control planes."""
