"""The intents of operators: functions that change them, and the repository that saves them."""
