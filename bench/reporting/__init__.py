"""Figures, tables and charts of results."""
