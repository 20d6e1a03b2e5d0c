"""Plugins: other people's code that may see, change, refuse or stop requests, and can break none. Knows events."""
