"""Prompts for pictures with writing on something: `a photo of a road sign that says "North Gate 12", at night`.

What is to be written stands in quotes and, as the `ocr` and `tesseract` rewards read it first, in `target`. Words are
joined at random: a model that guesses a text from its surroundings learns nothing about letters.
"""

from __future__ import annotations

import math

from marble_rl.errors import InputError
from marble_rl.prompts.files import Row
from marble_rl.prompts.kinds import Kind, different, digits

_WORDS = """
above after again amber anchor apple april arrow autumn bakery banjo beach below better between bicycle blanket
blossom bottle branch brave bread breeze bridge bright bronze brother bubble butter cabin candle canyon carnival
castle cedar cellar central chapel cherry chimney circle citrus clever clock cloud clover coast coffee comet copper
coral corner cotton country courage cricket crystal curious daily daisy dancing danger dawn desert diamond dinner
dolphin double dragon dream early eastern echo eleven ember emerald empire empty engine evening express fabric falcon
family farewell feather festival final fire flower forest forever fortune fountain fresh friend frozen future galaxy
gallery garden gate gentle giant ginger glacier golden good grand granite guide harbor harvest hazel hidden hollow
honey horizon hotel hungry island ivory jacket january jasmine jazz journey jungle junior keep kettle kind kitchen
ladder lantern last laundry lemon level library light limit linen little lobster lucky lunar magic mango maple marble
market meadow melody midnight mirror modern monday morning mountain museum music napkin narrow nectar never night
noble north notice number oasis ocean october olive only open orchard origin oyster pacific palace panda paper parade
parking pepper perfect piano pilot planet platform please pocket polar poppy prairie press private public quartz quick
quiet rabbit radio railway rainbow ranger rapid ready record ribbon river rocket royal rubber saddle safari salmon
salt sandy sapphire saturday school secret seven shadow silent silver simple sister sketch slow snow solar south
special spring square stadium station stone storm story studio sugar summer sunday sunset supper surface swift tavern
temple theater thunder ticket tiger timber today together tomorrow tower traffic travel treasure tropical tulip tunnel
twelve twenty under uniform upper valley vanilla velvet victory village vintage violet visitor voyage wagon walnut
warm water welcome western whisper wild willow window winter wisdom wonder wooden yesterday young zebra zero zigzag
"""
WORDS = tuple(_WORDS.split())
CARRIERS = (
    "a road sign",
    "a wooden signpost",
    "a neon sign",
    "a chalkboard",
    "a whiteboard",
    "a billboard",
    "a shop window",
    "a paper coffee cup",
    "a street poster",
    "a book cover",
    "a birthday cake",
    "a t-shirt",
    "a baseball cap",
    "a metal door plate",
    "a brick wall",
    "a train platform display",
    "a cardboard box",
    "a handwritten note",
    "a postage stamp",
    "a museum label",
    "a glass jar",
    "a banner across a street",
    "a laptop screen",
    "a phone screen",
    "a license plate",
    "a stone plaque",
    "a delivery van",
    "a theater marquee",
    "a restaurant menu",
    "a tote bag",
    "a wrist watch",
    "a cinema ticket",
)
STYLES = ("a photo of {}", "a close-up of {}", "an oil painting of {}", "a drawing of {}", "a 3d render of {}", "{}")
SAYS = ("that says", "that reads", "with the text", "showing")
SETTINGS = ("", ", at night", ", in the rain", ", on a sunny day", ", in soft morning light", ", seen from below")
CASES = (str.title, str.upper)
NUMBERS = range(1, 1000)


def kinds(words: tuple[int, int], numbers: float, where: str) -> dict[str, Kind]:
    """By number of words, and whether a number follows them."""
    least, most = words
    if least > most:
        raise InputError(f"{where}.words: {least} words at least and {most} at most; swap them")
    kinds_by_name = {}
    for count in range(least, most + 1):
        kinds_by_name[_name(count, False)] = _kind(count, False, 1 - numbers)
        kinds_by_name[_name(count, True)] = _kind(count, True, numbers)
    return kinds_by_name


def _name(count: int, numbered: bool) -> str:
    return f"{count} word{'s' * (count > 1)}{' and a number' * numbered}"


def _kind(count: int, numbered: bool, weight: float) -> Kind:
    scenes = (len(CARRIERS), len(STYLES), len(SAYS), len(SETTINGS), len(CASES), len(NUMBERS) if numbered else 1)
    sizes = (*scenes, *(len(WORDS) - i for i in range(count)))

    def write(number: int) -> Row:
        carrier, style, says, setting, case, figure, *choices = digits(number, *sizes)
        chosen = [WORDS[i] for i in different(choices)]
        text = CASES[case](" ".join(chosen)) + (f" {NUMBERS[figure]}" if numbered else "")
        scene = f'{CARRIERS[carrier]} {SAYS[says]} "{text}"{SETTINGS[setting]}'
        return Row(STYLES[style].format(scene), {"target": text})

    return Kind(weight, math.prod(sizes), write)
