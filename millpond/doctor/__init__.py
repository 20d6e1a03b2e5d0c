"""What this machine, library and model can do and promise. Knows every layer below; serves no request."""
