"""Dialects of tool calls, one file each, and the registry that picks one. Knows text; no vocabulary, no wire."""
