"""Rolling operations over nodes: drain, run an action, wait until healthy, undrain."""
