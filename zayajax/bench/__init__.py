"""Measures the devices at hand."""
