"""Stream a reply, word by word. Usage: python stream.py [MODEL] [PROMPT]"""

import sys

from mlxmoe import load

model = sys.argv[1] if len(sys.argv) > 1 else None  # a folder or a hub id; None is the built-in demo model
prompt = sys.argv[2] if len(sys.argv) > 2 else "In the beginning"

with load(model) as llm:
    for chunk in llm.stream(prompt, max_tokens=60, temperature=0.7, seed=2):
        print(chunk.text, end="", flush=True)
    print(f"\n\n{chunk.generated_tokens} tokens at {chunk.tokens_per_s:.1f} a second")
