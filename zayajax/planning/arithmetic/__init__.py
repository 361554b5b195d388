"""What arithmetic says of a step, without tracing it: memory, messages, time, and comparisons."""
