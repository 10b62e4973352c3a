import pytest

from nemorl.environments.tags import last_tagged


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer> 4\n</answer>", "4"),
        ("<answer>1</answer><answer>2</answer> so", "2"),
        ("<answer>no, <answer>4</answer>", "4"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("<answer>4", None),
        ("4</answer>", None),
        ("<b>4</b>", None),
    ],
)
def test_the_last_closed_pair_counts(text, inside):
    assert last_tagged(text, "answer") == inside
