"""Health checks of nodes: the status port and the MySQL greeting."""
