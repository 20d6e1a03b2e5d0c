"""PURE: who runs in the next step, with how many rows, and what must move in KV memory for it."""
