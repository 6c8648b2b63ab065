"""Several prompts at once: one pass gives each its next token. Usage: python together.py [MODEL]"""

import sys

from mlxmoe import load

prompts = ["In the beginning", "And it came to pass", "Blessed are the meek"]

with load(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    batch = llm.batch()
    replies = {batch.add(llm.encode(prompt), max_tokens=24): prompt for prompt in prompts}
    while batch.texts:  # others may be added at any time
        for text, chunk in batch.step():
            if isinstance(chunk, Exception):
                raise chunk
            replies[text] += chunk.text
    print("\n".join(replies.values()))
