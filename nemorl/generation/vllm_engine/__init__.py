"""vLLM behind the protocol of all engines: its arguments, its requests, and what its workers know of weights.

    arguments   our settings -> vLLM's, and the environment of its processes
    backend     requests and completions, over vLLM's asynchronous engine
    experts     what its routers chose, for router replay
    trace       which box of which HF tensor its loader puts where
    processing  which of its modules compute with other memory than their parameters
    weights     both together: what a worker requires, and how it takes that into use

The last three run in vLLM's own worker processes. Nothing of vLLM is imported before an engine starts.
"""
