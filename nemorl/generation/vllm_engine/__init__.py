"""Everything about vLLM: its processes, requests, weights and plan.

    plan        settings with which it cannot start, and the memory of its processes
    arguments   our settings as vLLM's arguments, and the environment of its processes
    backend     requests and completions, over vLLM's asynchronous engine
    host        the process of a replica: its front, and its side of the weight exchange
    worker      the extension of vLLM's workers, which receive weights
    trace       which box of which HF tensor vLLM's loader puts where
    weights     what a worker requires, and how it takes that into use

The last three run in vLLM's worker processes. Nothing of vLLM is imported before an engine starts.
"""
