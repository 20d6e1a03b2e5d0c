"""Measuring Millpond: load clients, paired figures, the consistency oracle. Knows all below it; serves nothing."""
