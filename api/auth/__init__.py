"""Who may come in: callers, what they may do, and how much of it; before FastAPI sees a request."""
