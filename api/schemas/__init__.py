"""The JSON bodies of the REST API, and how they are made from what the control plane knows."""
