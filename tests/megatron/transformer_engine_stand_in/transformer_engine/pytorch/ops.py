"""Names in annotations."""


class Sequential:
    pass


class FusibleOperation:
    pass
