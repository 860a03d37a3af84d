"""Joins all parts: runs the observers, decides when facts change, publishes, saves, and applies intents."""
