"""Choose the tokens yourself: the model is mlx-lm's, callable with caches. Usage: python own_sampling.py [MODEL]"""

import sys

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxmoe import load

with load(sys.argv[1] if len(sys.argv) > 1 else None, experts="50%") as llm:
    tokens = llm.tokenizer.encode("And the LORD said")
    cache = make_prompt_cache(llm.model)
    logits = llm.model(mx.array([tokens]), cache=cache)[0, -1]
    for _ in range(30):
        best_two = mx.argpartition(logits, kth=-2)[-2:]  # the likelier of two, but never the same token twice running
        likelier, other = sorted(best_two.tolist(), key=lambda token: -logits[token].item())
        tokens.append(other if likelier == tokens[-1] else likelier)
        logits = llm.model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
    print(llm.tokenizer.decode(tokens))
