"""Finding what a policy put between tags."""

import re


def last_tagged(text: str, tag: str) -> str | None:
    """Return the text between the last closed `<tag>` and its `</tag>`, trimmed; None without such a pair."""
    name = re.escape(tag)
    # The inner part may not open the tag again: `<answer> no, <answer>4</answer>` answers 4.
    found = re.findall(rf"<{name}>((?:(?!<{name}>).)*?)</{name}>", text, re.DOTALL)
    return found[-1].strip() if found else None
