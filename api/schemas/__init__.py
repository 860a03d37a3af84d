"""The JSON schemas of the REST API: strict requests, and responses read from the control plane's model."""
