"""The `millpond` command. Knows arguments, settings and what a terminal shows; every answer comes from below."""
