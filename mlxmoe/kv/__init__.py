"""KV caches: a window that is right however a prompt is divided, quantised rows, positions that stay in range."""
