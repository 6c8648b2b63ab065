"""An OpenAI-compatible server: `http/` above, the thread that owns the engine in `desk/`, `jobs.py` between the two.

An extra: `mlxmoe[serve]`. The chat page's files are in `page/`.
"""
