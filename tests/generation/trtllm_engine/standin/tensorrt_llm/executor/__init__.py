class RequestError(RuntimeError):
    """Something is wrong with one request."""
