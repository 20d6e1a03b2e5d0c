"""Wire <-> domain, pure: one module a dialect. No I/O, no clock, no engine."""
