"""The REST calls, one file a noun."""
