"""Rolling operations over nodes: drain, act, wait until a node is back, undrain, go on."""
