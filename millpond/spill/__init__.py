"""Bytes of saved KV state, in RAM and on disk. Knows span keys; not tokens, sequences, slots or requests."""
