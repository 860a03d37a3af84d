"""What it costs to move sessions, and what clients notice of it."""
