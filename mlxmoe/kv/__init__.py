"""KV caches: a window that is right however a prompt is divided, quantised rows, saved states, reuse of prefixes."""
