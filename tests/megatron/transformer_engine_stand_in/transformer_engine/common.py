"""Names that Megatron derives classes of at import."""


class recipe:
    class DelayedScaling:
        pass
