"""What real copies between the cards gave (``--deep``)."""

from statistics import median

from ..facts import Copy, Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

_BAD = ("wrong", "hangs", "failed")


def matrix(facts: Facts) -> list[Finding]:
    """Every copy arrives, and arrives right."""
    copies = facts.copies
    if copies is None:
        return []
    if isinstance(copies, Unknown):
        return [unknown("copies", copies.why)]
    bad = [copy for copy in copies if copy.result in _BAD]
    if bad:
        granted = any(copy.peer for copy in bad) or _granted(facts)
        return [
            error(
                "copies",
                f"{len(bad)} of {len(copies)} copies between cards {_verb(bad)}",
                "; ".join(_describe(copy) for copy in bad[:8]),
                "NCCL and the custom all-reduces use this path: a server hangs at its first "
                "all-reduce, or answers nonsense"
                + (", although the driver grants peer access" if granted else ""),
                "see iommu and acs above; until that is mended: NCCL_P2P_DISABLE=1 and "
                "--disable-custom-all-reduce",
            )
        ]
    left = [copy for copy in copies if copy.result == "not tried"]
    if left:
        return [
            unknown("copies", f"{len(left)} of {len(copies)} pairs not tried: {left[0].detail}")
        ]
    if not copies:
        return [unknown("copies", "there are no two cards to copy between")]
    direct = sum(copy.peer is True for copy in copies)
    return [ok("copies", f"{len(copies)} copies right, bit by bit; {direct} of them direct")]


def speed(facts: Facts) -> list[Finding]:
    """No pair is much slower than the others."""
    if not isinstance(facts.copies, tuple):
        return []
    timed = [copy for copy in facts.copies if copy.bandwidth and copy.latency_us]
    if not timed:
        return []
    rates = [copy.bandwidth or 0 for copy in timed]
    usual = median(rates)
    text = (
        f"{min(rates):.1f} to {max(rates):.1f} GB/s, median {usual:.1f}; 4 KiB in "
        f"{median([copy.latency_us or 0 for copy in timed]):.1f} us"
    )
    slow = [copy for copy in timed if (copy.bandwidth or 0) < usual / 2]
    if not slow:
        return [ok("copy-speed", text)]
    return [
        warning(
            "copy-speed",
            f"{len(slow)} pairs are less than half as fast as usual",
            text
            + "; "
            + ", ".join(f"{c.source}->{c.target}: {c.bandwidth or 0:.1f}" for c in slow[:8]),
            "an all-reduce waits for the slowest pair that it uses",
            "see link-width, link-speed and topology",
        )
    ]


def _granted(facts: Facts) -> bool:
    pairs = facts.pairs
    return not isinstance(pairs, Unknown) and all(pair.peer == "ok" for pair in pairs)


def _verb(bad: list[Copy]) -> str:
    kinds = {copy.result for copy in bad}
    if kinds == {"hangs"}:
        return "hang"
    return "arrive wrong" if kinds == {"wrong"} else "fail"


def _describe(copy: Copy) -> str:
    text = f"{copy.source}->{copy.target} {copy.result}"
    if copy.result == "wrong":
        text += f" ({copy.wrong_bytes} bytes)"
    return f"{text} ({copy.detail})" if copy.detail else text
