"""Real vLLM schedulers and the real connector around a runner that knows every byte of KV that is right.

kv.py: what is right. runner.py: the runner, with workers of its own. server.py: one engine around them. fuzz.py: what happens to it,
from a seed. rejecting.py: a connector whose synchronous loads fail.
"""
