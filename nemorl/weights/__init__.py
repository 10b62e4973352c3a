"""Weight exchange: policy to generation, each byte once, proved by checksum and version."""
