"""The server's side of the channel: the engine process and its restarts, and the token log."""
