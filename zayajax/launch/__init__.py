"""Processes: what they start with, how they find each other, what starts them on a cluster."""
