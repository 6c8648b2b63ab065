"""How much memory there is, and how it is divided. Knows nothing of models, experts or caches."""
