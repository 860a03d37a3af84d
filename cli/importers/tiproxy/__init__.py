"""Turns a configuration of TiProxy into settings. `conversion` is the entry point."""
