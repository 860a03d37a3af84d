"""The routes of the REST API, one file for each resource."""
