"""The report in a real browser: the ranked boards, one run, keyboard, two sizes of screen, and nothing fetched.

Chromium is a package of Debian and Ubuntu: `make browser` installs it. Without one these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
from urllib.parse import parse_qs

import pytest

from dpgen_bench.report import page as report
from dpgen_bench.report.page import build_report
from tests.report_toys import DEMO, built, make_run, write_report
from tests.table_toys import table_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SIZES = ((375, 812), (1280, 800))


@pytest.fixture(scope="module")
def browser():
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path; `make browser` as root installs one")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=executable, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(the report's address, ids by name): DP-MERF on digits.

    At ε = 10 FIDs of 9 (accuracy 80) and, with 50 features, 5 (accuracy 70); at 1 two seeds, of which one spends a part
    of its budget; at ∞ by another protocol.
    """
    results = tmp_path_factory.mktemp("site")
    ids = {}
    for name, words, proven, fid in (
        ("ten", ("privacy.epsilon=10",), 9.99, 9.0),
        ("fifty", ("privacy.epsilon=10", "method.features=50"), 9.99, 5.0),
        ("one", ("privacy.epsilon=1",), 0.99, 40.0),
        ("part", ("privacy.epsilon=1", "method.features=50"), 0.5, 30.0),
        ("inf", ("privacy.epsilon=inf",), None, 8.0),
    ):
        folder = make_run(results, DEMO, *words, fid=fid, proven=proven)
        ids[name] = folder.id
        if name in ("inf", "fifty"):
            (measured,) = folder.measurements.all()
            shutil.rmtree(folder.path / "metrics")
            changed = {"name": "another"} if name == "inf" else {}
            write_report(folder, {**measured["protocol"], **changed}, {"fid": fid, "acc_mlp_pct": 70.0})
    failed = make_run(results, DEMO, "privacy.epsilon=3", finish=False)
    failed.mark("failed", "train", ValueError("it was not to be"))
    (results / "plots").mkdir()
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="2000" height="900"><title>A plot</title></svg>'
    (results / "plots" / "first_table.svg").write_text(svg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "table_names", lambda: ["first_table", "second_table"])
        plot = {"kind": "bias_variance"}
        patch.setattr(report, "load_table", lambda name: table_of(title=name, plot=plot))
        patch.setattr(report, "build", lambda name, _, scale: built(name, scale))
        path = build_report(results)
    return path.as_uri(), {**ids, "failed": failed.id}


@pytest.fixture
def visit(browser, site):
    """Opens the report at an address; afterwards: no message on the console, no request but for the file itself."""
    messages, asked, pages = [], [], []

    def open_at(hash_: str = "", size: tuple[int, int] = SIZES[1]):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(site[0] + hash_)
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        page.close()
    assert messages == []
    assert {url.split("#")[0] for url in asked if not url.startswith("data:")} == {site[0]}


def column(page, key: str) -> list[str]:
    return page.locator(f'#board td[data-key="{key}"]').all_inner_texts()


def fragment(page) -> dict[str, list[str]]:
    return parse_qs(page.evaluate("location.hash").removeprefix("#"))


def test_the_first_board_is_ranked_and_every_switch_keeps_it_ranked(visit):
    page = visit()
    assert column(page, "place") == ["1", "2"]
    assert column(page, "fid") == ["5.0", "9.0"]
    assert column(page, "best") == ["best", "+4.0"]
    assert page.locator("#terms").inner_text() == (
        "2 lines, lowest FID first. Same for all: add/remove, δ = 1e-05, accountant pld, unit record, protocol quick."
    )
    page.get_by_label("Acc. MLP (%)").check()
    assert column(page, "place") == ["1", "2"]
    assert column(page, "acc_mlp_pct") == ["80.0", "70.0"]
    page.get_by_role("radio", name="10", exact=True).focus()
    page.keyboard.press("ArrowRight")
    assert fragment(page) == {"by": ["acc_mlp_pct"], "epsilon": ["inf"]}
    assert page.evaluate("document.activeElement.value") == "inf"
    again = visit(page.evaluate("location.hash"))
    assert column(again, "place") == ["1"]
    assert "protocol another" in again.locator("#terms").inner_text()
    assert "protocol quick" not in again.locator("#terms").inner_text()


def test_lines_that_cannot_be_compared_are_below_a_fold_with_the_reason(visit):
    page = visit("#epsilon=1")
    assert column(page, "fid") == ["40.0"]
    assert page.locator("#others-table").is_hidden()
    page.get_by_text("1 line that cannot be compared", exact=True).click()
    reason = page.locator('#others-table td[data-key="why"]').inner_text()
    assert reason == "seed 0: proven 0.5 leaves a part of 1 unspent"


def test_samples_stand_in_each_line_and_curves_below(visit):
    page = visit()
    for image in page.locator("#board .thumb img").all():
        assert image.evaluate("image => image.complete && image.naturalWidth") == 80
    assert page.locator("#board .thumb img").count() == 2
    for image in page.locator("#curves figure:visible img").all():
        assert image.evaluate("image => image.complete && image.naturalWidth") > 300
    assert page.locator("#curves figcaption:visible").inner_text().startswith("Digits, protocol quick: ")


def test_a_link_to_what_is_not_here_shows_nothing(visit):
    page = visit("#dataset=unheard&run=0123")
    assert column(page, "place") == []
    assert page.locator("#terms").inner_text() == "No line of this data set."
    assert "No run 0123" in page.locator("#run-title").inner_text()


def test_no_other_script_runs(browser, site):
    page = browser.new_page()
    page.goto(site[0])
    with pytest.raises(playwright.Error, match="Content Security Policy"):
        page.add_script_tag(content="document.title = 'changed'")
    assert page.title() == "dpgen report"
    page.close()


def test_a_run_opens_with_its_ledger_and_command_and_closes(visit, site):
    run = site[1]["ten"]
    page = visit("#epsilon=10")
    button = page.locator(f'#board .runs button[data-run="{run}"]')
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    assert run in page.locator("#run-title").inner_text()
    assert dialog.locator(".command").inner_text() == f"dpgen run {DEMO} privacy.epsilon=10"
    released = dialog.get_by_role("table", name="Releases").locator("tbody th, tbody td").all_inner_texts()
    assert released[:4] == ["mean_embedding", "PerRecord", "1", "7.5 (std calibrated)"]
    assert released[4:8] == ["Poisson rate 0.25", "0.25", "40", "40"]
    epsilons = dialog.get_by_role("table", name="Epsilon under both relations").locator("tbody tr").all_inner_texts()
    assert [re.split(r"\s+", row) for row in epsilons] == [
        ["add/remove", "9.5", "8.25"],
        ["replace-one", "inf", "16.5"],
    ]
    assert "not for release" in dialog.inner_text()
    assert dialog.locator("img").evaluate("image => image.complete && image.naturalWidth") == 80
    assert fragment(page) == {"epsilon": ["10"], "run": [run]}
    page.keyboard.press("Escape")
    assert dialog.is_hidden()
    assert fragment(page) == {"epsilon": ["10"]}
    assert button.evaluate("button => button === document.activeElement")
    button.click()
    page.get_by_role("button", name="Close (Esc)").click()
    assert dialog.is_hidden()


def test_a_link_opens_a_run_and_back_closes_one(visit, site):
    page = visit(f"#run={site[1]['inf']}")
    assert "ε budget ∞" in page.locator("#run-title").inner_text()
    page.keyboard.press("Escape")
    page.locator("#board").get_by_role("button", name="seed 0").first.click()
    assert page.get_by_role("dialog").is_visible()
    page.go_back()
    page.get_by_role("dialog").wait_for(state="hidden")
    assert "run" not in fragment(page)


def test_failed_runs_are_listed_with_their_error(visit, site):
    page = visit()
    first = page.locator("#all-runs tbody tr").first.inner_text()
    assert site[1]["failed"] in first
    assert "during training: ValueError: it was not to be" in first
    assert site[1]["failed"] not in json.dumps(page.locator("#board").inner_text())
    page.get_by_label("Find runs by any word").fill("NOT TO BE")
    assert page.locator("#all-runs tbody tr:visible").count() == 1


def test_tables_are_found_by_name_and_notes_are_read_without_a_pointer(visit):
    page = visit()
    tables = page.locator("details.table:visible")
    count = tables.count()
    assert count == 2
    page.get_by_label("Find a table by name").fill("SECOND")
    assert page.locator("details.table:visible .name").all_inner_texts() == ["second_table"]
    page.get_by_role("button", name="Open all").click()
    assert "No reproduction: scale reduced." in page.locator("details.table:visible .below").first.inner_text()
    assert "[100, −10.0]" in page.locator("details.table:visible table").first.inner_text()
    page.get_by_label("Find a table by name").fill("third")
    assert page.locator("#tables-none").is_visible()


def test_links_to_sections_keep_the_choice(visit):
    page = visit("#epsilon=10")
    page.get_by_role("link", name="Runs", exact=True).click()
    assert page.evaluate("document.activeElement.id") == "runs"
    assert fragment(page) == {"epsilon": ["10"]}


@pytest.mark.parametrize("size", SIZES)
def test_nothing_scrolls_sideways_and_a_phone_has_cards(visit, site, size):
    page = visit(size=size)
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    wide = "[...document.querySelectorAll('*')].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && "
    wide += "getComputedStyle(e).overflowX !== 'visible').map((e) => e.outerHTML.slice(0, 80))"
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate(wide) == []
    display = page.locator("#board tbody tr").first.evaluate("row => getComputedStyle(row).display")
    assert display == ("block" if size[0] < 400 else "table-row")
    value = page.locator('#board td[data-key="fid"]').first
    label = value.evaluate("cell => getComputedStyle(cell, '::before').content")
    assert label == ('"FID"' if size[0] < 400 else "none")
    page.evaluate(f"location.hash = 'run={site[1]['ten']}'")
    page.get_by_role("dialog").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size[0]
    assert page.get_by_role("dialog").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser, site, scheme):
    """WCAG's contrast of 4.5 for body text, soft text, links and remarks, in both colour schemes."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(site[0])
    ratios = page.evaluate(CONTRASTS)
    page.close()
    assert len(ratios) == 6
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (...colours) => {  // one over the other
    for (const colour of colours) { context.fillStyle = style.getPropertyValue(colour); context.fillRect(0, 0, 1, 1); }
    return context.getImageData(0, 0, 1, 1).data;
  };
  const light = (pixel) => {
    const [r, g, b] = [...pixel].map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const contrast = (ink, ...grounds) => {
    const [one, other] = [light(paint(...grounds, ink)), light(paint(...grounds))].sort((a, b) => b - a);
    return (one + .05) / (other + .05);
  };
  return {
    text: contrast("--ink", "--ground"), soft: contrast("--soft", "--ground"), raised: contrast("--soft", "--raised"),
    link: contrast("--link", "--ground"), bad: contrast("--bad", "--ground"),
    remark: contrast("--ink", "--warn-ground"),
  };
}"""
