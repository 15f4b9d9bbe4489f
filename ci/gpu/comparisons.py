"""What two engines, or the graph and the eager pass of one, made of the same requests."""

import json
import pickle
import statistics

FAILED = []  # what did not come to its end


def result(**fields):
    print("RESULT", json.dumps(fields), flush=True)
    if fields.keys() & {"error", "skipped"} or (
        fields.get("rc", 0) != 0 and fields["case"] != "refuse"
    ):
        FAILED.append(fields["case"])


def shadow(name, file):
    """Graph against eager, the same cycle on the same inputs, by batch size."""
    groups = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        groups.setdefault((entry["bs"], entry["graph_bs"]), []).append(entry)
    for (size, graph), entries in sorted(groups.items()):
        lengths = [length for entry in entries for length in entry["kv_lens"]]
        result(
            case=name,
            what="graph against eager, same inputs",
            bs=size,
            graph_bs=graph,
            cycles=len(entries),
            bit_equal=sum(e["dlogit"] == 0 and e["dhidden"] == 0 for e in entries),
            max_dlogit=round(max(e["dlogit"] for e in entries), 5),
            max_dhidden=round(max(e["dhidden"] for e in entries), 5),
            logit_std=round(statistics.mean(e["std"] for e in entries), 4),
            argmax_flips=sum(e["flips"] for e in entries),
            nan=sum(e["nan"] for e in entries),
            padded_nan=sum(e["padded_nan"] for e in entries),
            kv_lens=[min(lengths), max(lengths)],
        )


def equal(first, second, options, *, wanted=False):
    """How many requests of two cases have the same tokens, and their accept lengths; an error
    where ``wanted`` and a token or a verify pass differs."""
    files = [options.out / name / "runs.json" for name in (first, second)]
    runs = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    if not all(runs) or len(runs[0]) != len(runs[1]):
        return result(case=f"{first} and {second}", error="one has no tokens")
    for one, other in zip(*runs, strict=True):
        same = sum(a == b for a, b in zip(one["ids"], other["ids"], strict=True))
        lengths = [round(sum(map(len, run["ids"])) / sum(run["verify"]), 3) for run in (one, other)]
        requests = f"{same} of {one['bs']}"
        fields = {"bs": one["bs"], "equal": requests, "accept_length": lengths}
        if wanted and (one["ids"], one["verify"]) != (other["ids"], other["verify"]):
            fields["error"] = "not the same tokens and verify passes"
        result(case=f"{first} and {second}", **fields)
    return None


def load_trace(folder):
    """What draft-extend returned, by request, committed length and accepted tokens."""
    cycles = {}
    with (folder / "trace.pkl").open("rb") as stream:
        while True:
            try:
                entry = pickle.load(stream)
            except EOFError:
                return cycles
            for n, rid in enumerate(entry["rid"]):
                key = (rid, entry["lengths"][n], entry["accepted"][n])
                each = ("logits", "hidden", "index", "best", "best_ids")
                cycles[key] = {name: entry[name][n] for name in each} | {
                    "graph": entry["graph"],
                    "nan": entry["nan"],
                }


def against(first, second, options):
    """Two engines, cycle by cycle, as long as a request's tokens are the same in both."""
    import numpy

    folders = [options.out / name for name in (first, second)]
    traces = [load_trace(folder) for folder in folders]
    runs = [json.loads((folder / "runs.json").read_text()) for folder in folders]
    for one, other in zip(*runs, strict=True):
        size, differences = one["bs"], []
        pairs = [*zip(one["ids"], other["ids"], strict=True)]
        for n, (ours, theirs) in enumerate(pairs):
            same = first_difference(ours, theirs)
            for key in traces[0].keys() & traces[1].keys():
                if key[0] == f"b{size}-{n}" and key[1] + key[2] < one["prompt"][n] + same:
                    differences.append((traces[0][key], traces[1][key]))

        def largest(what, differences=differences):
            return max(float(numpy.abs(a[what] - b[what]).max()) for a, b in differences)

        result(
            case=f"{first} against {second}",
            bs=size,
            cycles=len(differences),
            graph_against_eager=sum(a["graph"] and not b["graph"] for a, b in differences),
            max_dlogit=round(largest("logits"), 5),
            max_dhidden=round(largest("hidden"), 5),
            draft_flips=sum(a["index"] != b["index"] for a, b in differences),
            nan=sum(a["nan"] for a, _ in differences),
            requests_with_equal_tokens=f"{sum(a == b for a, b in pairs)} of {size}",
            equal_verify_counts=one["verify"] == other["verify"],
        )


def first_difference(ours, theirs):
    """The first place where two lists differ; their length where they do not."""
    differ = (k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differ, len(ours))


def verified(trace, rid, prompt):
    """The best tokens with their logits, by the place of the output token that came of them."""
    return {
        length + row + 1 - prompt: dict(
            zip(cycle["best_ids"][row], cycle["best"][row], strict=True)
        )
        for (name, length, accepted), cycle in trace.items()
        if name == rid
        for row in range(accepted)
    }


def ties(first, second, options):
    """Where two engines' greedy tokens part: how much better each found its own there.

    Engines that round differently may part where two logits are closer than what rounding moves
    them by. So both gaps together are at most twice ``largest_difference``: of a logit between the
    engines, while the tokens before are the same.
    """
    folders = [options.out / name for name in (first, second)]
    runs = [json.loads((folder / "runs.json").read_text()) for folder in folders]
    if len(runs[0]) != len(runs[1]):
        return result(case=f"{first} and {second}", error="one has no tokens")
    traces = [load_trace(folder) for folder in folders]
    differences, found = [0.0], []
    for one, other in zip(*runs, strict=True):
        size, gaps, leads, misread = one["bs"], [], [], 0
        for n, (ours, theirs) in enumerate(zip(one["ids"], other["ids"], strict=True)):
            fork = first_difference(ours, theirs)
            here, there = (verified(trace, f"b{size}-{n}", one["prompt"][n]) for trace in traces)
            for place in range(1, min(fork + 1, len(ours))):  # the prefill made the first
                a, b, own, its = here[place], there[place], ours[place], theirs[place]
                misread += a.get(own) != max(a.values()) or b.get(its) != max(b.values())
                if place < fork:
                    differences += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
                    best, second_best, *_ = sorted(a.values(), reverse=True)
                    leads.append(best - second_best)
                else:
                    both = (a, its), (b, own)
                    gaps.append(sum(max(way.values()) - way.get(t, -99) for way, t in both))
        found.append((size, gaps, leads, misread))
    largest = max(differences)
    for size, gaps, leads, misread in found:
        widest = max(gaps, default=0.0)
        result(
            case=f"{first} and {second}",
            what="where tokens part",
            bs=size,
            tokens=len(leads),
            parted=f"{len(gaps)} of {size}",
            widest_gap=round(widest, 5),
            largest_difference=round(largest, 5),
            smallest_lead=round(min(leads), 5) if leads else None,
            median_lead=round(statistics.median(leads), 5) if leads else None,
            misread=misread,
            **({} if widest <= 2 * largest and not misread else {"error": "parted without a tie"}),
        )
    return None
