"""Wrong captions contradict the golden one, right paraphrases do not."""

from __future__ import annotations

import pytest

from mmctl.engine.recovery.canaries import CANARIES
from mmctl.engine.recovery.captions import closed_answer, contradictions

WRONG = [
    # colour
    ("A red circle on a white background.", "A blue circle on a white background."),
    ("A red circle on a white background.", "The circle is green."),
    ("A red circle above two blue squares.", "A blue circle above two red squares."),
    ("The word STOP in red letters.", "The word STOP in blue letters."),
    ("An orange half above a purple half.", "A purple half above a green half."),
    ("A red car parked on the street.", "A blue car parked on the street."),
    ("A brown dog sits beside a white cat.", "A white dog sits beside a brown cat."),
    # count
    ("Three green squares in a row.", "Four green squares in a row."),
    ("Three green squares in a row.", "There are 2 green squares."),
    ("Five black circles.", "A single black circle."),
    ("A red circle above two blue squares.", "A red circle above three blue squares."),
    ("Two dogs run across a field.", "Three dogs run across a field."),
    ("One red and two blue squares.", "Two red and one blue squares."),
    ("The black digit 7 on a white background.", "The black digit 1 on a white background."),
    ("The green number 42 on a white background.", "The number 24 in green."),
    # negation
    ("A red circle on a white background.", "There is no red circle in the image."),
    ("A red circle on a white background.", "A circle that is not red."),
    ("A man without a hat.", "A man with a hat."),
    ("A black triangle on a white background.", "The image does not contain a triangle."),
    # object
    ("A red circle on a white background.", "A red square on a white background."),
    ("A yellow triangle to the left of a purple circle.",
     "A purple circle to the left of a yellow triangle."),
    ("A yellow triangle to the left of a purple circle.",
     "A yellow triangle to the right of a purple circle."),
    ("A red circle above two blue squares.", "Two blue squares above a red circle."),
    ("A cat sleeps on a sofa.", "A dog sleeps on a sofa."),
    ("A cat sleeps on a sofa.", "A zebra sleeps on a sofa."),
    ("The word CAT in blue letters.", "The word DOG in blue letters."),
    ("A red circle on a white background.", "A red circle and a blue triangle."),
    ("A red circle on a white background.", "A blank picture."),
    ("The word STOP in red letters.", "A red circle."),
]  # fmt: skip

RIGHT = [
    ("A red circle on a white background.", "There is one crimson disc on a white backdrop."),
    ("A red circle on a white background.", "The image shows a circle that is red."),
    ("A red circle on a white background.", "A large red dot, and nothing else."),
    ("A red circle on a white background.", "A red circle, not a square."),
    ("Three green squares in a row.", "Three squares, all of them green."),
    ("Three green squares in a row.", "A row of 3 green boxes."),
    ("Three green squares in a row.", "The picture contains several green squares."),
    ("Five black circles.", "Three black circles above two black circles."),
    ("Five black circles.", "There are five dots and they are black."),
    ("A yellow triangle to the left of a purple circle.",
     "A violet circle is to the right of a yellow triangle."),
    ("A red circle above two blue squares.", "Two blue squares below a red circle."),
    ("A red circle above two blue squares.", "A pair of blue squares and one red circle."),
    ("The black digit 7 on a white background.", "A black seven... the number 7 in black."),
    ("The black digit 7 on a white background.", "A white background with a black 7."),
    ("The green number 42 on a white background.", 'It shows "42" written in green.'),
    ("The word STOP in red letters.", 'Red text that reads "stop".'),
    ("The word CAT in blue letters.", "Blue letters spell CAT."),
    ("The word CAT in blue letters.", "blue letters that spell cat"),
    ("The black digit 7 on a white background.", "The digit is a black seven."),
    ("A red car parked on the street.", "A scarlet automobile is parked along a road."),
    ("A cat sleeps on a sofa.", "A kitten is asleep on the couch."),
    ("A red car parked on the street.", "A parked red car."),
    ("A man without a hat.", "A guy who wears no hat."),
    ("Two dogs run across a field.", "A couple of dogs running through grass."),
]  # fmt: skip


@pytest.mark.parametrize(("golden", "candidate"), WRONG)
def test_wrong_captions_are_found(golden: str, candidate: str) -> None:
    assert contradictions(golden, candidate)


@pytest.mark.parametrize(("golden", "candidate"), RIGHT)
def test_right_paraphrases_pass(golden: str, candidate: str) -> None:
    assert contradictions(golden, candidate) == []


def test_each_canary_caption_agrees_with_itself_and_no_other() -> None:
    for one in CANARIES:
        assert contradictions(one.caption, one.caption) == []
        for other in CANARIES:
            if one is not other:
                either = contradictions(one.caption, other.caption)
                assert either or contradictions(other.caption, one.caption)


def test_closed_answers() -> None:
    assert closed_answer("It is red.") == closed_answer("Crimson") == "red"
    assert closed_answer("There are three of them") == closed_answer("3") == "3"
    assert closed_answer("red or blue") is None
    assert closed_answer("It is not red") is None
    assert closed_answer("qzx vv") is None
