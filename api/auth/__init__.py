"""Authentication, authorization, and rate limits of the REST API, applied before FastAPI sees a request."""
