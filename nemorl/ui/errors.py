"""What the pages of the web app say when a request cannot be answered."""


class UiError(Exception):
    """A refusal in a sentence, with the place that it concerns and what to do, where these are known."""

    def __init__(self, status: int, message: str, place: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.place, self.fix = status, message, place, fix

    def body(self) -> dict[str, str]:
        return {"error": self.message, "place": self.place, "fix": self.fix}
