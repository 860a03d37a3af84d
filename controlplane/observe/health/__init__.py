"""Health checks of nodes: of the status port and of the SQL port."""
