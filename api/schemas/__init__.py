"""The JSON schemas of the REST API, and their conversion from the control plane's model."""
