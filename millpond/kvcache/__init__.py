"""PURE accounting of KV cells and prefixes: what is held where, what could be reused, what must go."""
