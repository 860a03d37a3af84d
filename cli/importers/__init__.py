"""Importers: turn the configuration of another proxy into settings of Tidevoy."""
