"""The task of the quickstart that sees: count the circles of a small picture, and do not count the squares.

A picture has 48 x 48 pixels: three rows of three cells with a circle in one of three colours, a square, or nothing.
"""
import io
import random

from counting import Counting, Layout, TARGETS
from PIL import Image, ImageDraw

CELL = 16  # pixels
COLOURS = dict(zip(TARGETS, ("crimson", "seagreen", "royalblue")))


def picture(layout: Layout) -> Image.Image:
    """Draw a layout; the colours of its squares are drawn from the layout itself."""
    image = Image.new("RGB", (3 * CELL, 3 * CELL), "white")
    pen, rng = ImageDraw.Draw(image), random.Random("|".join(layout))
    for y, row in enumerate(layout):
        for x, cell in enumerate(row):
            box = (x * CELL + 3, y * CELL + 3, (x + 1) * CELL - 4, (y + 1) * CELL - 4)
            if cell in COLOURS:
                pen.ellipse(box, fill=COLOURS[cell])
            elif cell != ".":
                pen.rectangle(box, fill=rng.choice(list(COLOURS.values())))
    return image


def png(layout: Layout) -> bytes:
    """Return the picture of a layout as a PNG file."""
    file = io.BytesIO()
    picture(layout).save(file, "PNG")
    return file.getvalue()


TASK = Counting("lightrft/quickstart_vl", "<image>What is the number of circles?", "images", ".png", png)
