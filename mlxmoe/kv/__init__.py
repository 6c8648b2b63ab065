"""KV caches: their state as values, the files they are saved in, and the reuse of a prompt's prefix."""
