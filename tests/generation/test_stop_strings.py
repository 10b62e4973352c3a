"""Stop strings in text that arrives token by token."""

import pytest

from nemorl.generation.tokens import StopStringFinder

PIECES = [
    b"Hello",
    b" world",
    b"<",
    b"/",
    b"tool",
    b">",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"END",
    b" E",
    b"N",
    b"D",
]


def decode(tokens):
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def first_hit(stop_strings, tokens, prompt=()):
    finder = StopStringFinder(stop_strings, prompt, decode)
    return next((index for index, token in enumerate(tokens) if finder.push(token)), None)


@pytest.mark.parametrize(
    ("stop_strings", "tokens", "expected"),
    [
        (["END"], [0, 1, 9, 0], 2),
        (["</tool>"], [0, 2, 3, 4, 5, 0], 4),  # over four tokens
        (["</tool>", "world"], [0, 1, 2, 3, 4, 5], 1),  # the first to be complete
        (["END"], [0, 10, 11, 12], 3),  # a token with more before the string
        (["o wor"], [0, 1], 1),  # in the middle of two tokens
        (["€"], [0, 6, 7, 8], 3),  # a character over three tokens
        (["€ END"], [6, 7, 8, 10, 11, 12], 5),
        (["E"], [0, 1, 0, 9], 3),
        (["END"], [0, 10, 11, 0, 12], None),
    ],
)
def test_the_token_that_completes_a_stop_string_is_found(stop_strings, tokens, expected):
    assert first_hit(stop_strings, tokens) == expected


def test_the_prompt_does_not_count():
    assert first_hit(["END"], [0, 1], prompt=[0, 9]) is None
    assert first_hit(["END"], [11, 12], prompt=[0, 10]) is None
    assert first_hit(["ND"], [11, 12], prompt=[0, 10]) == 1


def test_a_long_text_is_not_decoded_again_and_again():
    decoded = []

    def counting(tokens):
        decoded.append(len(tokens))
        return decode(tokens)

    finder = StopStringFinder(["END"], [0] * 50, counting)
    assert not any(finder.push(token) for token in [0, 1] * 200)
    assert max(decoded) <= 6
