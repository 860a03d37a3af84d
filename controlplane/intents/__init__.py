"""Intents of operators: pure functions that change them, and the repository that saves them."""
