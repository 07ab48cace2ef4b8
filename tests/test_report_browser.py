"""The report in a real browser: sorting, filters, one run, keyboard, two sizes of screen, and nothing fetched."""

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
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=executable, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(the report's address, ids by epsilon): DP-MERF at 1 (two seeds), 2, 10 and inf, FIDs 40, 100, 9 and none."""
    results = tmp_path_factory.mktemp("site")
    ids = {}
    for epsilon, seed, fid in (("1", 0, 30.0), ("1", 1, 50.0), ("2", 0, 100.0), ("10", 0, 9.0), ("inf", 0, 8.0)):
        folder = make_run(results, DEMO, f"privacy.epsilon={epsilon}", f"seed={seed}", fid=fid)
        ids.setdefault(epsilon, folder.id)
        if epsilon == "inf":
            (measured,) = folder.measurements.all()
            shutil.rmtree(folder.path / "metrics")
            write_report(folder, {**measured["protocol"], "name": "another"}, {"acc_mlp_pct": 90.0})
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


def test_sorting_both_ways(visit):
    """Numbers as numbers; what is missing or infinite comes last either way."""
    page = visit()
    head = page.locator('#board th[data-key="fid"]')
    assert head.get_attribute("aria-sort") == "none"
    head.get_by_role("button").click()
    assert [text.split("\u00a0")[0] for text in column(page, "fid")] == ["9.0", "40.0", "100", "–"]
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert [text.split("\u00a0")[0] for text in column(page, "fid")] == ["100", "40.0", "9.0", "–"]
    assert head.get_attribute("aria-sort") == "descending"
    assert fragment(page) == {"sort": ["fid"], "order": ["down"]}
    proven = page.locator('#board th[data-key="proven"]').get_by_role("button")
    proven.focus()
    page.keyboard.press("Enter")
    assert column(page, "proven") == ["1", "2", "10", "inf"]
    page.keyboard.press("Enter")
    assert column(page, "proven") == ["10", "2", "1", "inf"]
    assert head.get_attribute("aria-sort") == "none"


def test_filters_choose_lines_and_samples_and_stay_in_the_address(visit):
    page = visit()
    remark = page.locator("#comparable")
    assert remark.is_visible()
    assert "2 protocols (another, quick)" in remark.inner_text()
    page.get_by_label("protocol").select_option("quick")
    assert remark.is_hidden()
    page.get_by_label("ε budget").select_option("1")
    assert column(page, "epsilon") == ["1"]
    assert column(page, "fid") == ["40.0\u00a0±\u00a014.1"]
    assert page.locator("#count").inner_text() == "1 of 4 lines"
    assert page.locator("#grids img").count() == 2  # two seeds
    assert fragment(page) == {"epsilon": ["1"], "protocol": ["quick"]}
    again = visit(page.evaluate("location.hash"))
    assert column(again, "epsilon") == ["1"]
    assert again.get_by_label("protocol").input_value() == "quick"
    again.get_by_role("button", name="Clear filters").click()
    assert len(column(again, "epsilon")) == 4
    assert fragment(again) == {}


def test_a_link_to_what_is_not_here_shows_nothing(visit):
    page = visit("#method=unheard&run=0123")
    assert column(page, "epsilon") == []
    assert "No run 0123" in page.locator("#run-title").inner_text()


def test_a_run_opens_with_its_ledger_and_command_and_closes(visit, site):
    run = site[1]["10"]
    page = visit("#epsilon=10")
    button = page.locator("#board").get_by_role("button", name="seed 0")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    assert run in page.locator("#run-title").inner_text()
    assert dialog.locator(".command").inner_text() == f"dpgen run {DEMO} privacy.epsilon=10 seed=0"
    released = dialog.get_by_role("region", name="Releases").locator("tbody td").all_inner_texts()
    assert released[:4] == ["mean_embedding", "PerRecord", "1", "7.5 (std calibrated)"]
    assert released[4:8] == ["Poisson rate 0.25", "0.25", "40", "40"]
    epsilons = dialog.get_by_role("region", name="Epsilon under both relations").locator("tbody tr").all_inner_texts()
    assert [re.split(r"\s+", row) for row in epsilons] == [
        ["add_remove", "9.5", "8.25"],
        ["replace_one", "inf", "16.5"],
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
    assert "ε budget inf" in page.locator("#run-title").inner_text()
    page.keyboard.press("Escape")
    page.locator("#board").get_by_role("button", name="seed 1").click()
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


def test_tables_are_found_by_name_and_marks_are_read_without_a_pointer(visit):
    page = visit()
    tables = page.locator("details.table:visible")
    count = tables.count()
    assert count == 2
    page.get_by_label("Find a table by name").fill("SECOND")
    assert page.locator("details.table:visible .name").all_inner_texts() == ["second_table"]
    page.get_by_role("button", name="Open all").click()
    assert "†1 scale reduced" in page.locator("details.table:visible .marks").first.inner_text()
    marked = page.locator("details.table:visible td.unlike").first
    assert marked.inner_text() == "100 → 90.0 (−10.0)†1"
    assert "gradient" in marked.evaluate("cell => getComputedStyle(cell).backgroundImage")
    page.get_by_label("Find a table by name").fill("third")
    assert page.locator("#tables-none").is_visible()


def test_links_to_sections_keep_the_choice(visit):
    page = visit("#epsilon=10")
    page.get_by_role("link", name="Runs", exact=True).click()
    assert page.evaluate("document.activeElement.id") == "runs"
    assert fragment(page) == {"epsilon": ["10"]}


@pytest.mark.parametrize("size", SIZES)
def test_the_page_never_scrolls_sideways(visit, site, size):
    page = visit(size=size)
    page.get_by_role("button", name="Open all").click()
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= size[0]
    board = page.locator("#board").evaluate("table => [table.scrollWidth, table.parentElement.clientWidth]")
    if size[0] < 400:
        assert board[0] > board[1]  # so there is something that the container has to scroll
    page.evaluate(f"location.hash = 'run={site[1]['10']}'")
    page.get_by_role("dialog").wait_for()
    assert page.evaluate(width) <= size[0]
    box = page.get_by_role("dialog").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size[0]
    assert page.get_by_role("dialog").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser, site, scheme):
    """WCAG's contrast of 4.5 for body text, soft text, links and marked cells, in both colour schemes."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(site[0])
    ratios = page.evaluate(CONTRASTS)
    page.close()
    assert len(ratios) == 7
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
    remark: contrast("--ink", "--warn-ground"), marked: contrast("--ink", "--ground", "--d3", "--hatch"),
  };
}"""
