"""HTTP over a `Desk`: OpenAI's API, the page's files, limits, health and metrics. Knows no engine and no MLX."""
