"""vLLM as an engine: weights by delta inside its worker, and a sidecar that speaks the embedded engine's protocol.

Inside vLLM's processes, through its own extension points:

    worker     the worker extension: what the sidecar can ask of a worker
    transfer   the weight-transfer engine: fetch, apply to a shadow, swap
    twin       a second copy of the model that updates go into, on CPUs
    loading    whole groups of checkpoint tensors into vLLM's packed layers
    routes     routed experts where vLLM's own capture does not run

Beside them, in the sidecar's process (no torch, no vLLM):

    launch     the command line and environment of `vllm serve`
    upstream   vLLM's HTTP interface, as far as it is used
    replica    swaps and pauses of one vLLM, and its comings and goings
    standing   what the words of its workers mean: whether they may generate, and what
    targets    which version it shall have
    tickets    requests in flight, and what may answer them
    generate   `/v1/generate` over vLLM's token-in/token-out endpoint
    openai     OpenAI's endpoints, passed through
    messages   what sidecar and worker say to each other
    numbers    what is counted
    server     the two listeners

`python -m rl_core.engines.vllm --help` starts both. Import from the modules: this package imports nothing by itself.
"""
