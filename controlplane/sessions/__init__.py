"""Commands to Envoys about their live sessions: list, find, end."""
