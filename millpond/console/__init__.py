"""The console: a static page, and the live values it shows. Knows what async_llm shows; no HTTP, no key."""
