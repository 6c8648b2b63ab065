"""What the memory guard does, told as it happens, and a resize in mid-reply. Usage: python watch_memory.py [MODEL]"""

import sys

from mlxmoe import load


def told(event):
    print(f"\n[{event.pressure}] {event.text}")


with load(sys.argv[1] if len(sys.argv) > 1 else None, on_memory=told) as llm:
    for chunk in llm.stream("And God said", max_tokens=40, temperature=0.7, seed=1):
        print(chunk, end="", flush=True)
        if chunk.generated_tokens == 20:
            llm.resize("25%")
    memory = llm.memory()
    print(f"\n{memory.bank_bytes:,} of {memory.plan.expert_bytes:,} bytes of experts in memory now")
