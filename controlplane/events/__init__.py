"""Events: the log of recent events, and the texts of their messages."""
