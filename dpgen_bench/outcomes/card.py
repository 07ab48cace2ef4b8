"""The model card of an exported generator: how to load it, what its epsilon means, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpgen_bench import __version__
from dpgen_bench.config.display import relation_name
from dpgen_bench.generator import Generator
from dpgen_bench.outcomes.listing import (
    describe_certified,
    describe_claims,
    describe_proven,
    format_epsilon,
    is_unbounded,
)
from dpgen_bench.outcomes.soundness import release_problems
from dpgen_bench.privacy.events import RELATIONS, budget_text
from dpgen_bench.privacy.ledger import unproven_reasons
from dpgen_bench.runs.measure import is_for_release
from dpgen_bench.store.checks import is_plugin, plugin_note
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.store.statistics import format_value, summarise
from dpgen_bench.store.values import metric_values, notes
from dpgen_bench.utils.errors import without_paths

USE = """\
import torch
from dpgen_bench import load_generator

generator = load_generator(".")  # the folder of this card
labels = torch.arange(generator.num_classes).repeat(8)
images = generator.sample(labels, seed=0)  # uint8 [n, c, h, w]: the images of samples.png, row by row
"""


def write_card(folder: RunFolder, generator: Generator, ledger: Mapping[str, Any], license_id: str) -> str:
    """The text of README.md.

    Args:
        ledger: the content of ledger.json, without paths of this machine.
        license_id: the license of the weights, as the model hub names it.
    """
    config = folder.config
    c, h, w = generator.image_shape
    title = f"{config.method.name} on {config.dataset.name}, ε = {describe_proven(_epsilon(ledger))}"
    blocks = [
        _front_matter(str(config.method.name), license_id),
        f"# {title}",
        _warning(ledger),
        f"A class-conditional generator of {h}x{w} images with {c} channel{'s' * (c > 1)} in {generator.num_classes} "
        f"classes, trained by the method `{config.method.name}` of dpgen_bench {__version__}{_run(folder)}.",
        f"![{8 * generator.num_classes} samples, one column for each class](samples.png)",
        "## Use",
        "Install dpgen_bench, then in this folder:",
        f"```python\n{USE}```",
        _modules(generator),
        "## Privacy",
        *_privacy(ledger),
        "## Caveats and what is out of scope",
        _list(filter(None, [*_caveats(ledger), plugin_note(folder)])),
        "## Metrics",
        *_metrics(folder),
        "## Training",
        _settings(folder),
        "The folder contains the weights (`model.safetensors`), how to build the generator (`config.json`), the ledger "
        "of all releases (`ledger.json`) and a picture. Training records, private state, checkpoints, logs and "
        "diagnostics of the run are not part of it.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _run(folder: RunFolder) -> str:
    """The run's id in brackets; nothing for a run for release, see `export.without_run_ids`."""
    return "" if is_for_release(folder.config) else f" (run `{folder.id}`)"


def _epsilon(ledger: Mapping[str, Any]) -> dict[str, Any]:
    return dict(ledger.get("epsilon") or ({"proven": "inf"} if is_unbounded(dict(ledger)) else {}))


def _front_matter(method: str, license_id: str) -> str:
    tags = ["differential-privacy", "image-generation", "synthetic-data", method.replace("_", "-")]
    head = [f"license: {license_id}", "library_name: dpgen_bench", "pipeline_tag: unconditional-image-generation"]
    return "\n".join(["---", *head, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _warning(ledger: Mapping[str, Any]) -> str:
    """Why neither the weights nor images are private, in front of everything else; "" if they are for release."""
    problems = release_problems(ledger)
    if not problems:
        return ""
    return (
        "> **NOT PRIVATE: this generator protects nobody.** It is for benchmarks on public data. Do not release it, or "
        "its images, as private: " + "; ".join(problems) + "."
    )


def _modules(generator: Generator) -> str:
    """Which module of the method's author is needed to load the generator; "" if the bench has it."""
    kind = type(generator)
    names = [f"{kind.__module__}.{kind.__qualname__}"]
    network = generator.config().get("net_config")
    if isinstance(network, Mapping):
        names.append(str(network.get("_target_")))
    needed = [name for name in names if is_plugin(name)]
    if not needed:
        return ""
    return (
        f"To load it, `{'` and `'.join(needed)}` must be importable. Its source is not part of dpgen_bench, nor of "
        "this folder: get the module from the author of the method, and put it on the Python path. Read it first, "
        "because loading executes it."
    )


def _privacy(ledger: Mapping[str, Any]) -> list[str]:
    """Tables of epsilon, of the settings that it depends on, and of the releases."""
    epsilon, budget, noise = _epsilon(ledger), ledger["budget"], ledger["noise"]
    if noise["mode"] == "seeded":
        mode = "**seeded: the noise is a function of the run's id, can be subtracted by anyone, and protects nothing**"
    else:
        mode = f"{noise['mode']}: {noise['meaning']}"
    stated = {
        "ε proven": describe_proven(epsilon),
        "ε claimed (the count of the method's paper, which need not bound the privacy loss)": describe_claims(epsilon),
        "ε certified (what `dpgen audit` showed the mechanisms to leak at least)": describe_certified(epsilon),
        "δ": f"{budget['delta']:g}",
        "neighbouring relation": relation_name(budget["relation"]),
        "unit of privacy": f"one {ledger['unit']}",
        "accountant": budget["accountant"],
        "ε budget": budget_text(_number(budget["epsilon"])),
        "noise": mode,
        "private diagnostics": ledger["diagnostics"],
    }
    parts = [_table(("", "value"), stated.items())]
    releases = [
        (
            entry["name"],
            f"{entry['bound']['kind']}, C = {entry['bound']['C']}",
            _sampling(entry["sampling"]),
            format_value(float(entry["std"])),
            f"{entry['times']:,}",
            f"{entry['executed']:,}",
        )
        for entry in ledger["entries"]
    ]
    names = ("mechanism", "bound", "sampling", "noise std", "approved releases", "made")
    parts.append(_table(names, releases) if releases else "The run made no release.")
    if table := epsilon.get("table"):
        rows = [(name, *(_cell(table[relation].get(name)) for relation in RELATIONS)) for name in table[RELATIONS[0]]]
        parts.append("ε of these releases by each accountant, under both relations:")
        parts.append(_table(("accountant", *map(relation_name, RELATIONS)), rows))
    return parts


def _caveats(ledger: Mapping[str, Any]) -> Iterable[str]:
    yield from (f"nothing is proven: {reason}" for reason in unproven_reasons(ledger))
    yield from ledger.get("warnings", [])
    yield from (failure["what"] for failure in ledger.get("failures", []))
    yield "ε is that of this generator alone: other releases from the same records compose with it"
    if ledger["noise"]["mode"] != "os":
        yield "metric values are computed from test records, which ε does not cover"
    yield from (f"out of scope: {text}" for text in ledger.get("out_of_scope", []))


def _metrics(folder: RunFolder) -> Iterable[str]:
    """A table for each protocol by which the run was measured."""
    config, measurements = folder.config, folder.measurements.all()
    if is_for_release(config):
        yield "They are left out: they are computed from test records, which the ε of this generator does not cover."
        return
    for measurement in measurements:
        protocol, repeats = measurement["protocol"], len(measurement["repeats"])
        yield (
            f"Protocol `{protocol['name']}`: {protocol['num_samples']:,} samples, {repeats} "
            f"repeat{'s' * (repeats > 1)}; scale `{config.scale.name}`, seed {config.seed}."
        )
        rows = [(name, summarise([values]).text()) for name, values in sorted(metric_values(measurement).items())]
        yield _table(("metric", "value"), rows) if rows else "No metric was measured."
        yield _list(map(without_paths, notes(measurement)))
    if not measurements:
        yield "The generator was not measured."


def _settings(folder: RunFolder) -> str:
    """A table of the dataset, the scale, the seed and the method's settings."""
    config, method = folder.config, folder.read_json("identity.json").get("method", {})
    named = {"dataset": config.dataset.name, "scale": config.scale.name, "seed": config.seed}
    of_method = {f"method.{key}": value for key, value in method.items() if key != "name"}
    rows = [(key, without_paths(str(value))) for key, value in {**named, **of_method}.items()]
    return _table(("setting", "value"), rows)


def _sampling(sampling: Mapping[str, Any]) -> str:
    settings = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in sampling.items()
    ]
    return ", ".join(text.removeprefix("kind ") for text in settings)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else format_epsilon(value)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
