"""Worlds and whole environments that somebody else runs, over HTTP: `docs/remote.md` is the protocol.

    protocol      names, bounds and refusals that both sides share        client     our side of a conversation
    messages      what comes from the other side, validated              world      a remote world for our harness
    capture       calls of a remote harness, made into one trajectory
    server        the customer's side: reference server                  worlds, sessions   what it keeps
    conformance   rules of the protocol, tried on a running server
    verifiers_env environments of the `verifiers` library, in an environment of their own

`protocol`, `server`, `worlds`, `sessions` and `conformance` need the standard library alone, so that a customer can run
them beside any pins of their own.
"""
