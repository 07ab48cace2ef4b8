"""Makes the table of docs/audit.md that compares certified with proven epsilons of the methods of the bench.

Audits take CPU-seconds to minutes each, so their values are kept in docs/tightness.csv:

    .venv/bin/python docs/make_tightness.py                          # the page, from the CSV
    .venv/bin/python docs/make_tightness.py --audit                  # and the CSV, for all methods; needs MNIST
    .venv/bin/python docs/make_tightness.py --audit dpgan psg        # and the CSV, for these methods
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from docs.page_tables import page_with, table
from dpgen_bench.audit.methods import MethodAudit, audit_method, method_spec
from dpgen_bench.config.display import relation_name
from dpgen_bench.privacy.events import RELATIONS, Relation

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "audit.md"
VALUES = ROOT / "docs" / "tightness.csv"
BEGIN, END = "<!-- table: made by docs/make_tightness.py -->", "<!-- end of the table -->"
HEADER = ("method", "settings", "relation", "moved / declared", "certified / proven", "by", "certified, model-free")
COLUMNS = ("method", "settings", "relation", "moved", "proven", "gdp", "model_free")
TRIALS = 100_000
# In the order of the table. Fits of networks are audited at scale=quick: a release moves as far in smaller networks.
METHODS = {
    "dp_merf": "",
    "dp_ntk": "",
    "dp_gauss": "",
    "dp_hp": "",
    "sim_pe": "",
    **dict.fromkeys(
        ("dpgan", "dp_cgan", "dpdm", "psg", "dp_sinkhorn", "gs_wgan", "g_pate", "datalens", "pate_gan"), "scale=quick"
    ),
}


def audited(method: str, relation: Relation) -> dict[str, str]:
    """The line of a method and a relation in the CSV."""
    words = [f"method={method}", "dataset=mnist", "privacy.epsilon=1", f"privacy.relation={relation}"]
    result = audit_method(method_spec(words + METHODS[method].split()), levels="ac", trials=TRIALS)
    assert result.certificate is not None
    return {
        "method": method,
        "settings": METHODS[method],
        "relation": relation,
        "moved": " ".join(f"{share:.3f}" for share in moved(result)),
        "proven": _text(result.proven),
        "gdp": _text(result.certificate.gdp),
        "model_free": _text(result.certificate.epsilon),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def moved(result: MethodAudit) -> list[float]:
    """How far each mechanism moved, of what is declared, between the two data sets that were attacked."""
    shares: dict[str, float] = {}
    for each in result.pair.moved:
        shares[each.mechanism] = max(shares.get(each.mechanism, 0.0), each.distance / each.declared)
    return list(shares.values())


def known() -> dict[tuple[str, str], dict[str, str]]:
    """The lines of the CSV by method and relation."""
    if not VALUES.exists():
        return {}
    with open(VALUES, newline="") as file:
        return {(line["method"], line["relation"]): line for line in csv.DictReader(file)}


def write(lines: dict[tuple[str, str], dict[str, str]]) -> None:
    """Write the CSV, in the order of `METHODS`."""
    with open(VALUES, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[key] for key in _order(lines))


def _order(lines: dict[tuple[str, str], dict[str, str]]) -> list[tuple[str, str]]:
    return [(method, relation) for method in METHODS for relation in RELATIONS if (method, relation) in lines]


def rows() -> list[tuple[str, ...]]:
    """The cells of the table."""
    lines, cells = known(), []
    for key in _order(lines):
        line = lines[key]
        shares = line["moved"].split()
        best, by = (line["gdp"], "GDP") if line["gdp"] else (line["model_free"], "model-free")
        cells.append(
            (
                f"`{line['method']}`",
                f"`{line['settings']}`" if line["settings"] else "–",
                relation_name(line["relation"]),
                ", ".join(shares),
                f"{float(best) / float(line['proven']):.2f}",
                by,
                f"{float(line['model_free']):.2f}",
            )
        )
    return cells


def page() -> str:
    """The page with its table made again."""
    return page_with(PAGE, BEGIN, table(HEADER, rows()), END)


def main(arguments: list[str]) -> None:
    """Audit what is asked for, and write the page."""
    if "--audit" in arguments:
        for method in [each for each in arguments if each != "--audit"] or METHODS:
            for relation in RELATIONS:
                write(known() | {(method, relation): audited(method, relation)})
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
