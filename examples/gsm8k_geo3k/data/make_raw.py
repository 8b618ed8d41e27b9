"""Write the word problems of ``raw_200.jsonl``: 25 original stories with eight sets of numbers each, as in GSM8K.

    python examples/gsm8k_geo3k/data/make_raw.py

Every line is ``{"question", "answer", "split"}``; answers hold calculator marks ``<<6*4=24>>`` and end with
``#### 24``.
"""
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

Story = tuple[str, list[str], int]  # question, worked steps, final answer
STORIES: list[Callable[[random.Random, str, str], Story]] = []
NAMES = ("Amara Bela Chen Dario Elif Farid Greta Hana Ivo Jonas Kaia Lena Mateo Nadia Omar Petra Quinn Rosa Sven Tariq "
         "Uma Viktor Wanda Yusuf Zoe").split()
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
VARIANTS, TEST_VARIANTS = 8, 2


def story(write: Callable[[random.Random, str, str], Story]) -> Callable[[random.Random, str, str], Story]:
    """Add one story: ``write(rng, name, other_name)``."""
    STORIES.append(write)
    return write


def eq(first: int, operation: str, second: int) -> str:
    """``6 * 4 = <<6*4=24>>24``."""
    value = OPERATIONS[operation](first, second)
    if operation == "/" and value * second != first:
        raise ValueError(f"{first} / {second} is no whole number")
    return f"{first} {operation} {second} = <<{first}{operation}{second}={value}>>{value}"


@story
def rolls(r, who, other):
    trays, each, eaten = r.randint(3, 9), r.randint(6, 12), r.randint(3, 15)
    return (f"{who} bakes {trays} trays of rolls with {each} rolls on each tray. The family eats {eaten} of them at "
            "breakfast. How many rolls are left?", [
                f"{who} bakes {eq(trays, '*', each)} rolls.",
                f"After breakfast {eq(trays * each, '-', eaten)} rolls are left."
            ], trays * each - eaten)


@story
def bus(r, who, other):
    start, off, on = r.randint(20, 45), r.randint(5, 15), r.randint(2, 18)
    return (f"A bus leaves the station with {start} passengers. At the first stop {off} passengers get off and {on} "
            "get on. At the second stop nobody gets off and twice as many people get on as at the first stop. How "
            "many passengers are on the bus now?", [
                f"After people get off at the first stop there are {eq(start, '-', off)} passengers.",
                f"Then others get on, which makes {eq(start - off, '+', on)}.",
                f"At the second stop {eq(2, '*', on)} people get on.",
                f"So there are {eq(start - off + on, '+', 2 * on)} passengers."
            ], start - off + 3 * on)


@story
def pencils(r, who, other):
    boxes, each, children = r.randint(3, 8), r.choice([12, 18, 24]), r.choice([2, 3, 6])
    return (f"{who} has {boxes} boxes with {each} pencils in each and shares all pencils equally among {children} "
            "classes. How many pencils does each class get?", [
                f"There are {eq(boxes, '*', each)} pencils.",
                f"Each class gets {eq(boxes * each, '/', children)} pencils."
            ], boxes * each // children)


@story
def savings(r, who, other):
    week, weeks, price = r.randint(8, 20), r.randint(5, 12), r.randint(15, 39)
    return (f"{who} saves ${week} every week for {weeks} weeks and then buys a jacket for ${price}. How many dollars "
            f"does {who} have left?", [
                f"{who} saves ${eq(week, '*', weeks)} in all.",
                f"After buying the jacket ${eq(week * weeks, '-', price)} is left."
            ], week * weeks - price)


@story
def marbles(r, who, other):
    mine, more = r.randint(12, 60), r.randint(5, 30)
    return (f"{who} has {mine} marbles. {other} has {more} more marbles than {who}. How many marbles do they have "
            "together?", [
                f"{other} has {eq(mine, '+', more)} marbles.",
                f"Together they have {eq(mine, '+', mine + more)} marbles."
            ], 2 * mine + more)


@story
def garden(r, who, other):
    length, width = r.randint(8, 25), r.randint(4, 7)
    return (f"{who} puts a fence around a rectangular garden that is {length} meters long and {width} meters wide. "
            "One meter of fence costs $3. How many dollars does the fence cost?", [
                f"One long and one short side are {eq(length, '+', width)} meters.",
                f"The whole way around is {eq(2, '*', length + width)} meters.",
                f"The fence costs ${eq(2 * (length + width), '*', 3)}."
            ], 6 * (length + width))


@story
def books(r, who, other):
    pages, days = r.randint(12, 30), r.randint(4, 9)
    rest = r.randint(20, 90)
    return (f"{who} reads {pages} pages of a book every day. After {days} days there are still {rest} pages to read. "
            "How many pages does the book have?", [
                f"In {days} days {who} reads {eq(pages, '*', days)} pages.",
                f"The book has {eq(pages * days, '+', rest)} pages."
            ], pages * days + rest)


@story
def apples(r, who, other):
    picked, bags = r.randint(4, 9), r.randint(3, 8)
    bad = r.randint(2, 9)
    total = picked * bags + bad
    return (f"{who} picks {total} apples. {bad} of them are rotten and thrown away. The others are put into bags of "
            f"{picked}. How many bags are filled?",
            [f"There are {eq(total, '-', bad)} good apples.", f"They fill {eq(total - bad, '/', picked)} bags."], bags)


@story
def discount(r, who, other):
    price, percent = 20 * r.randint(2, 15), r.choice([5, 10, 15, 20, 25])
    off = price * percent // 100
    return (f"A bicycle costs ${price}. This week every bicycle is sold with a discount of {percent}%. How many "
            f"dollars does {who} pay for the bicycle this week?", [
                f"{price} times {percent} is {eq(price, '*', percent)}.",
                f"So the discount is ${eq(price * percent, '/', 100)}.", f"{who} pays ${eq(price, '-', off)}."
            ], price - off)


@story
def ages(r, who, other):
    young, times, years = r.randint(4, 12), r.randint(2, 4), r.randint(3, 12)
    return (f"{other} is {times} times as old as {who}, who is {young} years old. How old will {other} be in {years} "
            "years?", [
                f"{other} is {eq(times, '*', young)} years old now.",
                f"In {years} years {other} will be {eq(times * young, '+', years)}."
            ], times * young + years)


@story
def stickers(r, who, other):
    half, given = r.randint(12, 48), r.randint(3, 11)
    return (f"{who} has {2 * half} stickers and gives half of them to {other}. Then {who} loses {given} stickers. "
            f"How many stickers does {who} have now?", [
                f"{who} keeps {eq(2 * half, '/', 2)} stickers.",
                f"After losing some, {who} has {eq(half, '-', given)} stickers."
            ], half - given)


@story
def train(r, who, other):
    fast, slow, hours, more = r.randint(60, 95), r.randint(30, 55), r.randint(2, 5), r.randint(2, 4)
    return (f"A train travels {hours} hours at {fast} miles per hour and then {more} hours at {slow} miles per hour. "
            "How many miles does it travel in all?", [
                f"The first part is {eq(hours, '*', fast)} miles.", f"The second part is {eq(more, '*', slow)} miles.",
                f"In all it travels {eq(hours * fast, '+', more * slow)} miles."
            ], hours * fast + more * slow)


@story
def tickets(r, who, other):
    adult, child, adults, children = r.randint(9, 16), r.randint(4, 8), r.randint(2, 5), r.randint(2, 7)
    return (f"A museum ticket costs ${adult} for adults and ${child} for children. How many dollars do {adults} "
            f"adults and {children} children pay?", [
                f"The adults pay ${eq(adults, '*', adult)}.", f"The children pay ${eq(children, '*', child)}.",
                f"Together they pay ${eq(adults * adult, '+', children * child)}."
            ], adults * adult + children * child)


@story
def work(r, who, other):
    wage, hours, days = r.randint(11, 24), r.randint(3, 8), r.randint(3, 6)
    return (f"{who} earns ${wage} per hour and works {hours} hours a day, {days} days a week. How many dollars does "
            f"{who} earn in two weeks?", [
                f"In a week {who} works {eq(hours, '*', days)} hours.",
                f"In a week {who} earns ${eq(hours * days, '*', wage)}.",
                f"In two weeks {who} earns ${eq(2, '*', hours * days * wage)}."
            ], 2 * hours * days * wage)


@story
def chairs(r, who, other):
    rows, each, extra = r.randint(6, 15), r.randint(8, 14), r.randint(3, 20)
    return (f"A hall has {rows} rows of {each} chairs. For a concert {extra} more chairs are brought, and all chairs "
            f"but {extra + 2} are taken. How many people sit?", [
                f"At first there are {eq(rows, '*', each)} chairs.",
                f"With the new ones there are {eq(rows * each, '+', extra)} chairs.",
                f"So {eq(rows * each + extra, '-', extra + 2)} people sit."
            ], rows * each - 2)


@story
def candles(r, who, other):
    wax, each, price = r.choice([120, 180, 240, 360]), r.choice([3, 4, 6]), r.randint(2, 7)
    return (f"{who} has {wax} ounces of wax. A candle needs {each} ounces and is sold for ${price}. How many dollars "
            f"does {who} get when all candles are sold?",
            [f"The wax is enough for {eq(wax, '/', each)} candles.",
             f"They bring ${eq(wax // each, '*', price)}."], wax // each * price)


@story
def chickens(r, who, other):
    hens, eggs, dozen = r.randint(3, 9), 6, 12
    weeks = 2 * r.randint(1, 4)
    return (f"{who} keeps {hens} hens, and each lays {eggs} eggs a week. How many boxes of a dozen eggs can {who} "
            f"fill after {weeks} weeks?", [
                f"In a week the hens lay {eq(hens, '*', eggs)} eggs.",
                f"In {weeks} weeks they lay {eq(hens * eggs, '*', weeks)} eggs.",
                f"They fill {eq(hens * eggs * weeks, '/', dozen)} boxes."
            ], hens * eggs * weeks // dozen)


@story
def water(r, who, other):
    tank, leak, hours = 10 * r.randint(12, 40), r.randint(3, 9), r.randint(4, 10)
    return (f"A tank holds {tank} liters of water and loses {leak} liters every hour through a leak. After {hours} "
            f"hours {who} closes the leak and pours in 25 liters. How many liters are in the tank?", [
                f"It loses {eq(leak, '*', hours)} liters.", f"Then {eq(tank, '-', leak * hours)} liters are left.",
                f"At the end there are {eq(tank - leak * hours, '+', 25)} liters."
            ], tank - leak * hours + 25)


@story
def cards(r, who, other):
    third, bought = r.randint(7, 30), r.randint(10, 40)
    return (f"{who} collects {3 * third} cards. {other} has a third as many, and then buys {bought} new ones. How "
            f"many cards does {other} have?", [
                f"At first {other} has {eq(3 * third, '/', 3)} cards.",
                f"Then {other} has {eq(third, '+', bought)} cards."
            ], third + bought)


@story
def change(r, who, other):
    juice, count, bread = r.randint(2, 4), r.randint(2, 5), r.randint(3, 6)
    return (f"{who} buys {count} bottles of juice for ${juice} each and a loaf of bread for ${bread}, and pays with "
            "a $50 bill. How many dollars of change are given back?", [
                f"The juice costs ${eq(count, '*', juice)}.", f"Everything costs ${eq(count * juice, '+', bread)}.",
                f"The change is ${eq(50, '-', count * juice + bread)}."
            ], 50 - count * juice - bread)


@story
def running(r, who, other):
    lap, laps, days = 100 * r.randint(2, 8), r.randint(3, 9), r.randint(2, 6)
    return (f"One lap around the park is {lap} meters. {who} runs {laps} laps a day on {days} days, and {other} runs "
            f"{lap} meters in all. How many meters more than {other} does {who} run?", [
                f"{who} runs {eq(lap, '*', laps)} meters a day.",
                f"In all {who} runs {eq(lap * laps, '*', days)} meters.",
                f"That is {eq(lap * laps * days, '-', lap)} meters more."
            ], lap * laps * days - lap)


@story
def flowers(r, who, other):
    vases, each, bunch = r.randint(3, 9), r.choice([6, 9, 12]), 3
    return (f"{who} wants to put {each} tulips into each of {vases} vases. Tulips are sold in bunches of {bunch} for "
            f"$2 a bunch. How many dollars does {who} spend?", [
                f"{who} needs {eq(vases, '*', each)} tulips.", f"That is {eq(vases * each, '/', bunch)} bunches.",
                f"They cost ${eq(vases * each // bunch, '*', 2)}."
            ], vases * each // bunch * 2)


@story
def parking(r, who, other):
    floors, spaces, free = r.randint(3, 7), r.randint(25, 60), r.randint(8, 60)
    return (f"A parking house has {floors} floors with {spaces} spaces each. {free} spaces are free. How many cars are "
            "parked in it?",
            [f"There are {eq(floors, '*', spaces)} spaces.",
             f"So {eq(floors * spaces, '-', free)} cars are parked."], floors * spaces - free)


@story
def temperature(r, who, other):
    morning, rise, fall = r.randint(35, 55), r.randint(2, 5), r.randint(3, 14)
    return (f"In the morning it is {morning} degrees. Until noon it gets {rise} degrees warmer every hour for 4 "
            f"hours. In the evening it is {fall} degrees colder than at noon. How many degrees is it in the evening?", [
                f"Until noon it gets {eq(rise, '*', 4)} degrees warmer.",
                f"At noon it is {eq(morning, '+', 4 * rise)} degrees.",
                f"In the evening it is {eq(morning + 4 * rise, '-', fall)} degrees."
            ], morning + 4 * rise - fall)


@story
def average(r, who, other):
    mean, spread, last = r.randint(60, 80), r.randint(2, 9), r.randint(1, 9)
    first, second, third = mean - spread, mean + spread + last, mean - last
    return (f"{who} scores {first}, {second} and {third} points in three tests. How many points is the average?", [
        f"The first two tests give {eq(first, '+', second)} points.",
        f"All three give {eq(first + second, '+', third)} points.",
        f"The average is {eq(first + second + third, '/', 3)} points."
    ], mean)


def variants(write: Callable[[random.Random, str, str], Story], rng: random.Random) -> list[Story]:
    """Return ``VARIANTS`` problems of one story, each with other numbers."""
    found: dict[tuple[str, ...], Story] = {}
    while len(found) < VARIANTS:
        problem = write(rng, *rng.sample(NAMES, 2))
        found.setdefault(tuple(re.findall(r"\d+", problem[0])), problem)
    return list(found.values())


def rows(seed: int = 0) -> list[dict[str, str]]:
    """Return all problems; of each story the last variants are held out."""
    rng, out = random.Random(seed), []
    for write in STORIES:
        for number, (question, steps, final) in enumerate(variants(write, rng)):
            split = "test" if number >= VARIANTS - TEST_VARIANTS else "train"
            out.append({"question": question, "answer": "\n".join([*steps, f"#### {final}"]), "split": split})
    return out


def main() -> None:
    """Write the file alongside this script."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    Path(__file__).with_name("raw_200.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
