"""The same words with a quarter of the experts in memory. Usage: python small_memory.py [MODEL]"""

import sys

from mlxmoe import load

model = sys.argv[1] if len(sys.argv) > 1 else None
replies = []
for experts in ("all", "25%"):
    with load(model, experts=experts) as llm:
        replies.append(llm.generate("And it came to pass", max_tokens=40))
        plan, stats = llm.plan, llm.stats()
        print(f"experts={experts}: {plan.bank_bytes / 1e6:.1f} of {plan.expert_bytes / 1e6:.1f} MB in memory,")
        print(f"  {stats.hit_rate:.0%} hits, {stats.bytes_read / 1e6:.1f} MB read while generating")
print(replies[0])
print("The same words:", replies[0] == replies[1])
