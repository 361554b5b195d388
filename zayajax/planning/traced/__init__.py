"""What the traced program of a step says: what it sends, what may hide, what it holds."""
