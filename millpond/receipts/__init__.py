"""What was generated, kept so that it can be proven and replayed: a chained record in SQLite. Knows ids, no text."""
