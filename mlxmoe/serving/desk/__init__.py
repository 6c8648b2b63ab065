"""The one thread that owns an engine, and what it needs to answer many: queue, pace, counts. Knows no HTTP."""
