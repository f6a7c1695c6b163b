"""The rows: which command measures each, what is read from its result, and what is wanted of ours against the best peer."""

import statistics
from dataclasses import dataclass, field


@dataclass
class Measure:
    """One line of the table. `key`: a path into the result; `added`: less the median without a gateway."""

    name: str
    key: str
    unit: float = 1.0
    digits: int = 0
    higher: bool = False
    added: bool = False
    # Ours as a multiple of the best peer's, and ours itself: at least or at most, as `higher` says.
    ratio: float | None = None
    limit: float | None = None


@dataclass
class Row:
    title: str
    words: list
    measures: list
    # Counts at --quick instead of the ones in `words`.
    quick: dict = field(default_factory=dict)
    load: bool = True
    # Windows this many times as long, for rates too low to say much of a p99.
    stretch: int = 1
    # On a process of its own, and in at most so many rounds.
    fresh: bool = False
    rounds_max: int = 100
    direct: bool = True

    def command(self, given):
        words = list(self.words)
        if self.load:
            words += ["--warmup-ms", given.warmup_ms, "--measure-ms", given.measure_ms * self.stretch]
        if given.quick:
            for flag, value in self.quick.items():
                words += [flag, value]
        return words


MS = 1e-3


def per_s(ratio=None, name="requests/s"):
    return Measure(name, "per_s", higher=True, ratio=ratio)


def added(ratio=None):
    quantiles = (("p50", "p50_us"), ("p99", "p99_us"))
    return [Measure(f"added {name}, ms", key, MS, 3, added=True, ratio=ratio) for name, key in quantiles]


def cost():
    return [
        Measure("CPU per 1,000 requests, ms", "cpu_us", digits=1),
        Measure("peak RSS, MB", "peak_kib", 1 / 1024, 1),
    ]


def chat(title, connections, measures, *more, stretch=1):
    return Row(title, ["load", "--connections", connections, *more], measures, stretch=stretch)


def streams(title, connections, writes, ratio=None):
    events = Measure("events/s", "events_per_s", higher=True)
    first = Measure("first byte p50, ms", "first_p50_us", MS, 3)
    measures = [per_s(ratio, "streams/s"), events, first, *cost()]
    return chat(title, connections, measures, "--stream", writes)


def bodies(title, connections, size, ratio=None):
    return chat(title, connections, [per_s(ratio), *added(), *cost()], "--body-bytes", size)


def cancelled(story, name):
    return Measure(f"{name}, p50, ms", f"{story}/p50_us", MS, 2, limit=5)


ROWS = {
    "a-c1": chat("(a) chat, 1 KB, 1 connection", 1, [per_s(), *added(0.5), *cost()]),
    "a-c32": chat("(a) chat, 1 KB, 32 connections", 32, [per_s(2.5), *added(0.5), *cost()]),
    "a-c512": chat("(a) chat, 1 KB, 512 connections", 512, [per_s(), *added(0.5), *cost()]),
    "a-open": chat("(a) chat, 1 KB, open loop, 1,000 requests/s", 256, [*added(0.5), *cost()], "--rate", 1000, stretch=3),
    "b-c1": streams("(b) 64 tokens in one write, 1 connection", 1, "burst"),
    "b-c32": streams("(b) 64 tokens in one write, 32 connections", 32, "burst", 5),
    "b-each-c1": streams("(b) 64 tokens, a write each, 1 connection", 1, "each"),
    "b-each-c32": streams("(b) 64 tokens, a write each, 32 connections", 32, "each", 5),
    "c-64k": bodies("(c) bodies of 64 KB, 16 connections", 16, 64 << 10),
    "c-1m": bodies("(c) bodies of 1 MB, 4 connections", 4, 1 << 20, 1.7),
    "c-16m": bodies("(c) bodies of 16 MB, 2 connections", 2, 16 << 20),
    "d": Row(
        "(d) P works 30 ms, D answers at once",
        ["first-byte"],
        [
            Measure("D's first byte to the client's, p50, ms", "first_p50_us", MS, 3, limit=0.2),
            Measure("the same, p90, ms", "first_p90_us", MS, 3),
            Measure("request to first byte, p50, ms", "waited_p50_us", MS, 2),
        ],
        {"--requests": 5},
        load=False,
    ),
    "e": Row(
        "(e) memory",
        ["memory"],
        [
            Measure("RSS at 2,000 idle streams, MB", "idle_kib", 1 / 1024, 1, ratio=0.5),
            Measure("KB per idle stream", "idle_per_stream_kib", digits=1),
            Measure("RSS at 200 slow readers, MB", "slow_kib", 1 / 1024, 1),
            Measure("KB per slow reader", "slow_per_reader_kib", digits=1),
            Measure("KB that D could push per slow reader", "slow_pushed_kib_per_reader"),
            Measure("RSS before, MB", "before_kib", 1 / 1024, 1),
        ],
        {"--idle": 200, "--slow": 20},
        load=False,
        fresh=True,
        rounds_max=3,
        direct=False,
    ),
    "f": Row(
        "(f) until the last leg is closed",
        ["cancel"],
        [
            cancelled("client_leaves_before_first_token", "client leaves before the first token"),
            cancelled("client_leaves_stream", "client leaves the stream"),
            cancelled("prefill_fails", "P fails, D's leg"),
            cancelled("decode_fails", "D fails, P's leg"),
        ],
        {"--requests": 3},
        load=False,
        direct=False,
    ),
}


def value_at(result, key):
    for part in key.split("/"):
        result = result.get(part) if isinstance(result, dict) else None
    return result


def summary(results):
    """Per fleet, row, system: per measure the median, the least and the greatest over the rounds."""
    whole = {}
    for fleet, rows in results.items():
        for name, systems in rows.items():
            cells = whole.setdefault(fleet, {}).setdefault(name, {})
            for system, runs in systems.items():
                cells[system] = cell(ROWS[name], runs, systems.get("direct", []))
    return whole


def cell(row, runs, direct):
    good = [run for run in runs if "refused" not in run]
    cell = {"rounds": len(runs)}
    if len(good) < len(runs):
        cell["refused"] = [run["refused"] for run in runs if "refused" in run]
    for measure in row.measures:
        base = 0
        if measure.added:
            without = [value_at(run, measure.key) for run in direct if "refused" not in run]
            if not without:
                continue
            base = statistics.median(without)
        values = [value_at(run, measure.key) for run in good]
        values = [(value - base) * measure.unit for value in values if value is not None]
        if values:
            cell[measure.name] = [statistics.median(values), min(values), max(values)]
    return cell


def shown(cell, measure):
    if measure.name not in cell:
        return "refused" if "refused" in cell else "-"
    median, least, greatest = (f"{value:,.{measure.digits}f}" for value in cell[measure.name])
    mark = f" ({len(cell['refused'])} of {cell['rounds']} refused)" if "refused" in cell else ""
    return f"{median} [{least}–{greatest}]{mark}"


def verdict(cells, measure):
    """Ours against the best peer, and what is wanted."""
    ours = cells.get("tandem", {}).get(measure.name)
    others = [cell for name, cell in cells.items() if name not in ("tandem", "direct")]
    peers = [cell[measure.name][0] for cell in others if measure.name in cell]
    if measure.limit is not None:
        good = ours and ours[0] <= measure.limit
        return "", f"≤ {measure.limit} {'✓' if good else '✗'}" if ours else f"≤ {measure.limit}"
    if not ours or not peers:
        return "", ""
    best = max(peers) if measure.higher else min(peers)
    if best <= 0 or ours[0] <= 0:
        return "below noise", ""
    ratio = ours[0] / best
    if measure.ratio is None:
        return f"{ratio:.2f}", ""
    good = ratio >= measure.ratio if measure.higher else ratio <= measure.ratio
    return f"{ratio:.2f}", f"{'≥' if measure.higher else '≤'} {measure.ratio} {'✓' if good else '✗'}"


def markdown(summary, machine, given):
    lines = [f"{machine['cpus']} CPUs, {machine['rounds']} rounds, windows of {given.measure_ms} ms, load before "
             f"{machine['load_before']:.1f}. Medians [least–greatest]."]
    for fleet, rows in summary.items():
        systems = given.systems
        peers = [name for name in systems if name not in ("direct", "tandem")]
        last = "tandem / best peer" if peers else "tandem / best peer (none)"
        lines += ["", f"### {fleet}", "", f"| row | {' | '.join(systems)} | {last} | wanted |"]
        lines.append("|---" * (len(systems) + 3) + "|")
        for name, cells in rows.items():
            row = ROWS[name]
            lines.append(f"| **{row.title}** " + "| " * (len(systems) + 2) + "|")
            for measure in row.measures:
                ratio, wanted = verdict(cells, measure)
                shown_cells = [shown(cells.get(system, {}), measure) for system in systems]
                lines.append(f"| {measure.name} | {' | '.join(shown_cells)} | {ratio} | {wanted} |")
    return "\n".join(lines)
