"""Events: the log of recent events, and the event messages."""
