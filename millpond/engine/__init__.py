"""The engine process: one loop thread that plans, moves KV, decodes and samples. Token ids only, never text."""
