"""Several replies computed together over one model: continuous batching, as `Engine.batch()` gives it."""
