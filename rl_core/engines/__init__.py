"""Engines: what generates tokens, and how others talk to it.

The embedded engine is PyTorch on CPU: continuous batching over a slot KV cache with prefix reuse, and weight swaps
between decode steps. `python -m rl_core.engines --help` serves it over HTTP.

    config     what a model folder says of the model          kv          key/value rows and prefix reuse
    linear     prepacked linear layers                        sampling    tokens and their logprobs
    weights    packed weights; repacking only what changed    scheduler   the decode loop of one weight slot
    model      the forward pass                               engine      weight slots, swaps, pauses
    server     the HTTP listeners                             client      how Python talks to a server (no torch)

Import from the modules: this package imports nothing by itself, so that clients start without torch.
"""
