"""An OpenAI-compatible server: HTTP above, one thread that owns the engine below. An extra: `mlxmoe[serve]`."""
