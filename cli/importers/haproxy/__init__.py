"""Turns a configuration of HAProxy into settings. `conversion` is the entry point."""
