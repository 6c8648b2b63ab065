"""Two conversations with one model, in turns. Each keeps its own KV cache. Usage: python chat_session.py [MODEL]"""

import sys

from mlxmoe import load

with load(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    anna, ben = llm.session(), llm.session()  # with a chat model: llm.session(system="Be brief.")
    for turn in ("And God said", " And the people answered"):
        for name, session in (("Anna", anna), ("Ben", ben)):
            print(f"{name}:{turn}", end="")
            for chunk in session.stream(turn, max_tokens=20, temperature=0.7, seed=len(name)):
                print(chunk, end="", flush=True)
            print()
