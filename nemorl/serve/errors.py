"""What a request is told when it cannot be answered, in OpenAI's shape."""

from typing import Any


class ApiError(Exception):
    """A refusal with its HTTP status; the message is a sentence for who asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`param` is the field of the request; `kind` and `code` are OpenAI's words."""
        super().__init__(message)
        self.status, self.message = status, message
        self.kind, self.param, self.code = kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param=param)
