"""Authentication, authorization, rate limit and audit of the REST API."""
