"""Fonts and the methods that draw with them: sim_pe, public_fonts and uniform_noise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.fonts import read_glyphs
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context
from dpgen_bench.nets.glyphs import SIZE, STYLE, GlyphGenerator, draw, embed
from dpgen_bench.privacy.bounds import Batch
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.testing import check_method
from methods.public_fonts import PublicFonts
from methods.sim_pe import SimPE, nearest
from methods.uniform_noise import UniformNoise
from tests.run_toys import config

DIGITS = tuple("0123456789")
OWN = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FONTS: dict[str, Any] = dict(fonts=None, fonts_digest=None, characters=None)


def public_fonts(**settings: Any) -> PublicFonts:
    return PublicFonts(**{**FONTS, "degree": 1.0, **settings})


def sim_pe(**settings: Any) -> SimPE:
    defaults = dict(candidates=30, rounds=3, decay=0.7, threshold=1.0, degree=0.2)
    return SimPE(**{**FONTS, **defaults, **settings})


def fit(method: Any, epsilon: float, names: tuple[str, ...] = DIGITS) -> tuple[Generator, Ledger]:
    records = Digits().load("train")
    ledger = Ledger(Budget(epsilon), len(records))
    services = Services(ledger, Key.seeded("fonts"))
    data = PrivateData(records.images, records.labels, 10, services, class_names=names)
    return method.fit(data, Context(0, services=services)), ledger


# --- fonts ------------------------------------------------------------------------------------------------------------


def test_the_fonts_of_matplotlib_have_digits_in_the_middle_of_the_image():
    glyphs = read_glyphs(None, DIGITS)
    assert len(glyphs.fields) >= 15
    assert glyphs.fields.shape[1:] == (10, SIZE, SIZE)
    ink = draw(glyphs.fields.flatten(0, 1), torch.zeros(10 * len(glyphs.fields), STYLE), 28, 28)
    assert float(ink.flatten(1).amax(dim=1).min()) > 0.6
    assert float(ink[:, [0, -1]].max()) == 0.0
    centre = (ink.sum(dim=1) * torch.arange(28)).sum(dim=1) / ink.sum(dim=(1, 2))
    assert float((centre - 13.5).abs().max()) < 4.0


def test_faces_do_not_depend_on_names_of_files_or_folders_and_equal_faces_count_once(tmp_path):
    for name in ("DejaVuSans.ttf", "DejaVuSerif.ttf", "cmr10.ttf"):
        shutil.copy(OWN / name, tmp_path / name)
    one = read_glyphs(str(tmp_path), DIGITS)
    other = tmp_path / "other" / "deep"
    other.mkdir(parents=True)
    for number, path in enumerate(sorted(tmp_path.glob("*.ttf"), reverse=True)):
        shutil.copy(path, other / f"{number}.TTF")
    (other / "notes.txt").write_text("no font")
    (other / "broken.ttf").write_bytes(b"no font either")
    again = read_glyphs(str(other), DIGITS)
    assert torch.equal(one.fields, again.fields)
    assert one.digest == again.digest
    assert len(one.fields) == len(read_glyphs(str(tmp_path / "."), DIGITS).fields) == 3


def test_a_face_without_a_character_is_left_out(tmp_path):
    shutil.copy(OWN / "DejaVuSans.ttf", tmp_path)
    shutil.copy(OWN / "cmr10.ttf", tmp_path)
    assert len(read_glyphs(str(tmp_path), ("A", "Ж")).fields) == 1  # Computer Modern has no Cyrillic letters


def test_a_folder_without_fonts_and_classes_that_are_no_characters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected method\.fonts to be a folder with fonts, got '/nowhere'"):
        read_glyphs("/nowhere", DIGITS)
    with pytest.raises(
        ValueError, match=r"with the characters 0 1 .*, got no file of such a font; give another folder"
    ):
        read_glyphs(str(tmp_path), DIGITS)
    shutil.copy(OWN / "cmr10.ttf", tmp_path)
    with pytest.raises(ValueError, match="with the characters Ж, got 1 font files of which none has them"):
        read_glyphs(str(tmp_path), ("Ж",))
    with pytest.raises(ValueError, match=r"classes that are characters.*got 'trouser', ' '; use a data set of char"):
        fit(public_fonts(), 0.0, names=(*"01234567", "trouser", " "))
    with pytest.raises(ValueError, match=r"one character for each of 10 classes, got 'abc'; give 10"):
        fit(public_fonts(characters="abc"), 0.0)
    with pytest.raises(ValueError, match=r"another character for each class, got 'A' for several; change"):
        fit(public_fonts(characters="AACDEFGHIJ"), 0.0)
    fit(public_fonts(characters="ABCDEFGHIJ"), 0.0, names=tuple(f"class {i}" for i in range(10)))


def test_other_fonts_than_those_of_the_digest_are_refused_and_ids_depend_on_the_digest_only(tmp_path):
    shutil.copy(OWN / "cmr10.ttf", tmp_path)
    folder = str(tmp_path)
    digest = read_glyphs(folder, DIGITS).digest
    for stated in (None, "0123"):
        with pytest.raises(ValueError, match=rf"states \({stated}\), got 1 faces .* set method.fonts_digest={digest} "):
            fit(public_fonts(fonts=folder, fonts_digest=stated), 0.0)
    fit(public_fonts(fonts=folder, fonts_digest=digest), 0.0)
    texts = ["method=sim_pe", "dataset=digits"]
    ids = [
        build_spec(compose_config([*texts, f"method.fonts={fonts}", f"method.fonts_digest={stated}"])).id
        for fonts, stated in (("/one", "aa"), ("/another", "aa"), ("/one", "bb"))
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("method", ["sim_pe", "public_fonts"])
def test_a_folder_of_fonts_never_stands_for_the_run_with_the_default_fonts(tmp_path, method):
    small = ["method.candidates=4", "method.rounds=1"] if method == "sim_pe" else ["privacy.epsilon=0"]

    def run(*overrides: str) -> RunFolder:
        composed = compose_config([f"method={method}", "dataset=digits", f"results={tmp_path}", *small, *overrides])
        composed.protocol = config(tmp_path).protocol
        return execute(composed)

    own = tmp_path / "fonts"
    own.mkdir()
    shutil.copy(OWN / "cmr10.ttf", own)
    assert run().done
    runs = sorted((tmp_path / "runs").iterdir())
    for folder, message in (("/nowhere", "expected method.fonts to be a folder"), (own, "set method.fonts_digest=")):
        with pytest.raises(ValueError, match=message):
            run(f"method.fonts={folder}")
    assert sorted((tmp_path / "runs").iterdir()) == runs


REFUSED = [
    (["method=dp_gauss", "method.dim=784"], "method.dim: expected less than 784"),
    (["method=dp_sinkhorn", "init=gauss", "init.dim=784"], "init.dim: expected less than 784"),
    (["method=g_pate", "method.dims=785"], "method.dims: expected d <= 784"),
    (["method=sim_pe", "dataset=fashion_mnist"], "expected classes that are characters"),
    (["method=public_fonts", "method.characters=012"], "one character for each of 10 classes"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_that_do_not_fit_the_data_are_refused_before_a_run_exists(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        execute(compose_config(["dataset=digits", f"results={tmp_path}", *overrides]))
    assert not (tmp_path / "runs").exists()


# --- drawing ----------------------------------------------------------------------------------------------------------


def test_styles_turn_move_and_thicken():
    x, y = torch.meshgrid(*2 * [torch.linspace(-0.5, 0.5, SIZE)], indexing="xy")
    bar = torch.minimum(0.05 - x.abs(), 0.35 - y.abs())  # the signed distance to the edge of a vertical bar
    field = (128 + 512 * bar).clamp(0, 255).to(torch.uint8)[None]

    def ink(number: int, value: float) -> Tensor:
        style = torch.zeros(1, STYLE)
        style[0, number] = value
        return draw(field, style, 56, 56)[0]

    plain, thick, thin = ink(0, 0.0), ink(6, 1.0), ink(6, -0.5)
    assert float(thin.sum()) < 0.8 * float(plain.sum()) < 0.8 * float(thick.sum())
    torch.testing.assert_close(ink(0, 0.7), ink(0, -0.7).flip(1), atol=0.1, rtol=0)
    columns = torch.arange(56.0)
    moved = [float((image.sum(dim=0) * columns).sum() / image.sum()) for image in (plain, ink(4, 1.0))]
    assert moved[1] - moved[0] == pytest.approx(0.12 * 56, abs=0.2)


def test_drawings_are_chosen_with_their_probabilities():
    net = GlyphGenerator((3, 8, 8), 2, 1 + STYLE, drawings=3, degree=0.0)
    fields = torch.tensor([0, 128, 255], dtype=torch.uint8)[:, None, None].expand(3, SIZE, SIZE)
    weights = torch.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    net.fill(torch.arange(6), fields.repeat(2, 1, 1), torch.zeros(6, STYLE), weights)
    z = torch.rand(400, 1 + STYLE, generator=torch.Generator().manual_seed(0))
    z[0, 0], z[1, 0] = 0.0, 1.0 - 2.0**-24
    drawn = net(z, torch.zeros(400, dtype=torch.int64))
    assert drawn.shape == (400, 3, 8, 8)
    levels = drawn.mean(dim=(1, 2, 3))
    assert set(levels.tolist()) == {0.0, 1.0}
    assert float(levels.mean()) == pytest.approx(0.75, abs=0.1)
    assert set(net(z, torch.ones(400, dtype=torch.int64)).flatten().tolist()) == {0.5}


def test_embeddings_and_votes_are_exact_for_any_order_and_odd_records():
    images = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % 3
    rows = embed(images)
    assert rows.shape == (40, 196)
    assert torch.equal(rows, rows.round())
    assert 0.0 <= float(rows.min()) <= float(rows.max()) <= 127.0
    direct = F.conv2d(
        F.avg_pool2d((images.double() * 255).round(), 2),
        torch.tensor([[[[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]]]).double(),
        padding=1,
    )
    torch.testing.assert_close(rows, (direct * 127 / (16 * 255)).flatten(1).float(), atol=0.51, rtol=0)
    candidates = embed(torch.rand(3 * 5, 1, 28, 28, generator=torch.Generator().manual_seed(2))).reshape(3, 5, -1)
    votes = nearest(candidates)(images, labels).squeeze(1)
    distances = torch.cdist(rows.double()[:, None], candidates[labels].double()).squeeze(1)
    assert torch.equal(votes, 5 * labels + distances.argmin(dim=1))
    odd = torch.stack([torch.full((1, 28, 28), value) for value in (float("nan"), 1e30, -1e30, float("inf"))])
    batch = Batch(odd, torch.zeros(4, dtype=torch.int64), torch.arange(4), Key.seeded("odd"))
    assert float(Votes(bins=15).value(nearest(candidates), batch, None)["value"].sum()) == 4.0
    assert embed(torch.rand(2, 3, 64, 64)).shape == (2, 256)
    assert embed(torch.rand(2, 1, 8, 8)).shape == (2, 64)


def test_a_vote_on_a_wide_image_does_not_depend_on_the_other_records():
    """Bright images whose squared distances exceed 2^24; single rows and batches are rounded differently in float32."""
    rng = torch.Generator().manual_seed(0)
    candidates = embed(0.9 + 0.1 * torch.rand(400, 1, 28, 400, generator=rng)).reshape(2, 200, -1)
    assert float(candidates[0, 0].square().sum()) > 2**24
    images, labels = 0.9 + 0.1 * torch.rand(60, 1, 28, 400, generator=rng), torch.arange(60) % 2
    together = nearest(candidates)(images, labels)
    alone = torch.cat([nearest(candidates)(images[i : i + 1], labels[i : i + 1]) for i in range(60)])
    assert torch.equal(together, alone)
    rows = embed(images).double()
    distances = (rows[:, None] - candidates[labels].double()).square().sum(dim=2)
    assert torch.equal(together.squeeze(1), 200 * labels + distances.argmin(dim=1))


# --- methods ----------------------------------------------------------------------------------------------------------


def ledger_of(results: Path, method: str, *overrides: str) -> dict[str, Any]:
    """The ledger of a run on a few digits."""
    settings = config(results)
    settings.method = compose_config([f"method={method}"]).method
    for override in overrides:
        key, value = override.split("=")
        OmegaConf.update(settings, key, float(value) if key == "privacy.epsilon" else int(value))
    return execute(settings).read_json("ledger.json")


def test_a_method_without_records_conforms():
    check_method(UniformNoise, num_classes=3, image_shape=(3, 16, 16), budget=Budget(0.0))


@pytest.mark.parametrize(("method", "public_data"), [("public_fonts", "fonts"), ("uniform_noise", None)])
def test_methods_without_records_prove_zero(method, public_data, tmp_path):
    ledger = ledger_of(tmp_path, method, "privacy.epsilon=0")
    assert ledger["epsilon"]["proven"] == 0.0
    assert ledger["entries"] == []
    assert ledger.get("public_data") == public_data


def test_uniform_noise_is_uniform_and_the_same_for_all_classes():
    generator, _ = fit(UniformNoise(), 0.0)
    images = generator.sample(torch.arange(10).repeat(20), seed=0)
    counts = torch.bincount(images.flatten().long(), minlength=256).double()
    assert images.shape == (200, 1, 28, 28)
    # The variance of a sum of squared differences of counts is that of chi-squared with 255 degrees of freedom.
    assert abs(float(((counts - counts.mean()) ** 2).sum() / counts.mean()) - 255.0) < 6.0 * (2.0 * 255.0) ** 0.5


def test_votes_make_drawings_more_like_the_records():
    """The distance from a record to the nearest image of its class, without privacy and without records."""
    records = Digits().load("test")
    rows = embed(records.images.float() / 255.0)
    distances = {}
    for name, method, epsilon in (("votes", sim_pe(rounds=6), float("inf")), ("none", public_fonts(), 0.0)):
        generator, ledger = fit(method, epsilon)
        images = generator.sample(torch.arange(10).repeat(30), seed=0)
        drawn = embed(images.float() / 255.0).reshape(30, 10, -1).transpose(0, 1)
        distances[name] = float(torch.cdist(rows[:, None], drawn[records.labels]).amin(dim=2).mean())
        assert len(ledger.entries) == (name == "votes")
    assert distances["votes"] < 0.8 * distances["none"]


def test_a_fit_is_within_its_budget_and_states_fonts(tmp_path):
    ledger = ledger_of(tmp_path, "sim_pe", "privacy.epsilon=1", "method.candidates=8", "method.rounds=2")
    assert 0.99 < ledger["epsilon"]["proven"] <= 1.0
    assert ledger["public_data"] == "fonts"
    [entry] = ledger["entries"]
    assert (entry["bound"]["kind"], entry["bound"]["bins"], entry["times"], entry["executed"]) == ("Votes", 80, 2, 2)
