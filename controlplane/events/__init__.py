"""What happened: the log of recent events, and the texts of events."""
