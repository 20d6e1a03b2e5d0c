"""Strings to tokens and back, in the server process. Knows a vocabulary and a template; no engine, no wire."""
