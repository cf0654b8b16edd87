"""Scenes that differ from a given one in one detail of its caption.

A reward model learns to distinguish their pictures and captions from the right ones.
"""

from __future__ import annotations

import random
from dataclasses import replace

from marble_rl.mini.shapes import SHAPES
from tools.mini.scenes import COLOURS, GLYPHS, LIGHTS, NUMBERS, PLACES, RELATIONS, Scene, arrange

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def near_miss(scene: Scene, dice: random.Random) -> Scene:
    """Change one letter, colour, shape, number, relation, place or light, in the picture and in the caption."""
    changes = [change(scene, dice) for change in (_letter, _colour, _shape, _number, _relation, _place, _light)]
    return dice.choice([changed for changed in changes if changed is not None and changed.caption != scene.caption])


def _letter(scene: Scene, dice: random.Random) -> Scene | None:
    if scene.sign is None:
        return None
    old = scene.sign.text
    i = dice.randrange(len(old))
    new = old[:i] + dice.choice([glyph for glyph in GLYPHS if glyph != old[i]]) + old[i + 1 :]
    return replace(scene, caption=scene.caption.replace(f'"{old}"', f'"{new}"'), sign=replace(scene.sign, text=new))


def _colour(scene: Scene, dice: random.Random) -> Scene | None:
    words = scene.caption.split()
    named = [colour for colour in COLOURS if colour in words]
    if not named:
        return None
    old, new = dice.choice(named), dice.choice([colour for colour in COLOURS if colour not in named])
    items = tuple(replace(item, colour=new) if item.colour == old else item for item in scene.items)
    sign = replace(scene.sign, colour=new) if scene.sign else None
    return replace(scene, caption=scene.caption.replace(old, new), items=items, sign=sign)


def _shape(scene: Scene, dice: random.Random) -> Scene | None:
    shown = sorted({item.shape for item in scene.items})
    if not shown:
        return None
    old, new = dice.choice(shown), dice.choice([shape for shape in SHAPES if shape not in shown])
    items = tuple(replace(item, shape=new) if item.shape == old else item for item in scene.items)
    return replace(scene, caption=scene.caption.replace(old, new), items=items)


def _number(scene: Scene, dice: random.Random) -> Scene | None:
    if len({(item.shape, item.colour) for item in scene.items}) != 1:
        return None
    count, first = len(scene.items), scene.items[0]
    new = dice.choice([number for number in NUMBERS if number != count])
    things = scene.caption.split(first.shape)[0].split(maxsplit=1)[1:]  # the words between the number and the shape
    plural = f"{first.shape}s" if count > 1 else first.shape
    tail = scene.caption.split(plural, 1)[1]
    head = " ".join([("a" if new == 1 else NUMBERS[new]), *(thing.strip() for thing in things)])
    items = tuple(replace(first, x=x, y=y, radius=radius) for x, y, radius in arrange(new, dice))
    return replace(scene, caption=f"{head} {first.shape}{'s' if new > 1 else ''}{tail}", items=items)


def _relation(scene: Scene, dice: random.Random) -> Scene | None:
    named = [relation for relation in RELATIONS if f" {relation} " in scene.caption]
    if not named:
        return None
    (old,) = named
    first, second = scene.items
    items = (replace(first, x=second.x, y=second.y), replace(second, x=first.x, y=first.y))
    return replace(scene, caption=scene.caption.replace(old, OPPOSITE[old]), items=items)


def _place(scene: Scene, dice: random.Random) -> Scene | None:
    named = [(phrase, place) for phrase, place in PLACES.items() if phrase and phrase in scene.caption]
    if not named:
        return None
    phrase = dice.choice([phrase for phrase in PLACES if phrase and phrase != named[0][0]])
    return replace(scene, caption=scene.caption.replace(named[0][0], phrase), place=PLACES[phrase])


def _light(scene: Scene, dice: random.Random) -> Scene | None:
    named = [phrase for phrase in LIGHTS if phrase and phrase in scene.caption]
    if not named:
        return None
    phrase = dice.choice([phrase for phrase in LIGHTS if phrase and phrase != named[0]])
    return replace(scene, caption=scene.caption.replace(named[0], phrase), light=LIGHTS[phrase])
