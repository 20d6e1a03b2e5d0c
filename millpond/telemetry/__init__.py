"""What an operator sees of a running server: metrics for Prometheus, and log lines as JSON. Knows observers' events."""
