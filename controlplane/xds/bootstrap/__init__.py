"""The bootstrap configuration of an Envoy."""
