"""The report page as a person meets it: drawn, without a network, by mouse, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import base64
import json
import re
from importlib import resources
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from perfed import demo
from perfed.comparison import compare
from perfed.explain.explanation import FILE, FOLDER
from perfed.leaderboard import Comparison
from perfed.report.page import write
from tests.browser import made_up
from tests.browser.chromium import Browser

LINES = ("accuracy", "loss", "bytes", "flops", "sorted")
CLIENTS = 6
PARSED = "JSON.parse(document.querySelector('#data').textContent)"


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The demo's methods, for two rounds."""
    words = demo.WORDS | {"rounds": 2, "clients": CLIENTS, "eval_every": 1}
    settings = {name: {"unfreeze": [0, 1]} for name in demo.SETTINGS}
    return compare(
        demo.names(), out=tmp_path_factory.mktemp("demo") / "runs", settings=settings, nets=demo.NETS, **words
    )


@pytest.fixture(scope="module")
def page(everyone: Comparison) -> str:
    return write([everyone.directory], everyone.directory / "report.html").as_uri()


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("seeds")
    made_up.comparison(place / "runs", ["local", "fedavg", "fedrep", "cd2pfed"], rounds=8, clients=9, seeds=3)
    return write([place / "runs"], place / "page.html").as_uri()


@pytest.fixture(scope="module")
def besides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A page of methods that keep or send more than their network, and how many numbers their network has."""
    place = tmp_path_factory.mktemp("besides")
    words = {"net": {"name": "mlp", "hidden": [8]}, "clients": 5, "split": "classes:2", "rounds": 2, "eval_every": 1}
    compare(["ditto", "scaffold", "fedavg", "fedavg+ft"], out=place / "runs", **words)
    return write([place / "runs"], place / "page.html").as_uri(), 64 * 8 + 8 + 8 * 10 + 10


def test_everything_is_drawn_and_nothing_is_asked_for(browser: Browser, page: str, everyone: Comparison) -> None:
    browser.requests()
    browser.open(page)
    methods = len(everyone.runs)
    assert methods == len(demo.names()) >= 27
    assert browser.count("#board tbody tr") == methods
    for chart in LINES:
        assert browser.count(f"#{chart} g.series") == methods, chart
        assert browser.count(f"#{chart} g.series:not(.grey)") == 8, chart
    assert browser.count("#bubbles g.seen") == CLIENTS
    assert browser.count("#glance .card") == methods
    assert browser.count("#layers [data-layer]") == 3
    assert browser.count("#gains rect") == CLIENTS
    assert browser.count("#confusions table.confusion") == 2
    assert browser.text("#board tbody th button") == everyone.rows[0]["method"]
    assert f"{100 * everyone.rows[0]['mean']:.2f}" in browser.text("#board tbody tr")
    assert browser.text("#commands pre").startswith("perfed compare --methods ")
    assert everyone.rows[0]["state_sha256"][0] in browser.text("#hash-rows")
    assert browser.log() == []
    asked = [url for url in browser.requests() if not url.startswith(("data:", "about:"))]
    assert [url for url in asked if url != page] == []


def test_the_order_is_that_of_the_leaderboard_and_can_be_changed(
    browser: Browser, page: str, everyone: Comparison
) -> None:
    browser.open(page)
    shown = browser.run("[...document.querySelectorAll('#board tbody th button')].map((e) => e.textContent)")
    assert shown == [row["method"] for row in everyone.rows]
    browser.run("document.querySelector('[data-column=\"8\"]').click()")
    shown = browser.run("[...document.querySelectorAll('#board tbody th button')].map((e) => e.textContent)")
    up = {row["method"]: row["bytes_up"] for row in everyone.rows}
    assert [up[name] for name in shown] == sorted(up.values())
    assert browser.run("document.activeElement.dataset.column") == "8"


def test_methods_are_turned_off_and_on_by_mouse_and_by_keyboard(browser: Browser, page: str) -> None:
    browser.open(page)
    button = '.method[data-method="0"]'

    def state() -> tuple[str, list[int]]:
        pressed = browser.run("document.querySelector(arguments[0]).getAttribute('aria-pressed')", button)
        return pressed, [browser.count(f"#{chart} g.series:not(.grey)") for chart in LINES]

    assert state() == ("true", [8] * 5)
    browser.find(button).click()
    assert state() == ("false", [7] * 5)
    browser.find(button).send_keys(Keys.SPACE)
    assert state() == ("true", [8] * 5)
    assert browser.run("document.activeElement.dataset.method") == "0"
    browser.find(button).send_keys(Keys.ENTER)
    assert state() == ("false", [7] * 5)
    browser.find(".check input").click()  # the others are no longer drawn at all
    assert browser.count("#accuracy g.series") == 7


def test_values_can_be_pointed_at_and_walked_through(browser: Browser, page: str, everyone: Comparison) -> None:
    browser.open(page)
    plot = browser.find("#accuracy .plot")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert browser.text("#live").startswith("Round 1: ")
    plot.send_keys(Keys.ARROW_RIGHT)
    best = everyone.runs["fedrep"][0].history[-1]["local.mean"]
    assert browser.text("#live").startswith("Round 2: ")
    assert f"fedrep {100 * best:.2f} %" in browser.text("#live")
    assert not browser.run("document.querySelector('#tip').hidden")
    browser.run("document.querySelector('#bytes svg').dispatchEvent(new PointerEvent('pointermove', {clientX: 600}))")
    assert browser.count("g.series.hot") >= 1
    browser.find("#accuracy + details summary").click()
    browser.until(lambda: browser.count("#accuracy + details tbody tr") == len(everyone.runs))


def test_another_method_is_looked_at_closely(browser: Browser, page: str, everyone: Comparison) -> None:
    browser.open(page)
    place = [row["method"] for row in everyone.rows].index("vanilla")
    browser.run("document.querySelectorAll('#glance .card')[arguments[0]].click()", place)
    assert browser.text("#closely-title") == "vanilla, closely"
    idle, sent = browser.run(  # the second layer is frozen in the first of two rounds
        "['idle', 'sent'].map((c) => document.querySelector(`#layers [data-layer=fc2] .${c}`).getBBox().width)"
    )
    assert sent == pytest.approx(idle / 2, rel=0.02)


def choose(browser: Browser, method: str) -> None:
    shown = browser.run("[...document.querySelectorAll('#glance .card .who')].map((e) => e.textContent)")
    browser.run("document.querySelectorAll('#glance .card')[arguments[0]].click()", shown.index(method))


def test_second_models_and_variates_have_rows_of_their_own(browser: Browser, besides: tuple[str, int]) -> None:
    page, size = besides
    browser.open(page)
    hows = "[...document.querySelectorAll('#layers [data-besides] path')].map((e) => e.getAttribute('class')).sort()"
    choose(browser, "fedavg")
    assert browser.count("#layers [data-besides]") == browser.count("#layers .besides") == 0
    choose(browser, "ditto")
    assert browser.run(hows) == ["kept"]
    assert f"kept besides, {size:,} numbers, shaped like the whole network" in browser.text("#layers .besides")
    assert browser.count("#layers .keys .got") == 0
    choose(browser, "scaffold")
    assert browser.run(hows) == ["got", "kept", "sent"]
    assert all(f"{how} besides, {size:,} numbers" in browser.text("#layers .besides") for how in ("kept", "sent"))
    assert browser.count("#layers .keys .got") == 1
    plot = browser.find("#layers .plot")
    for _ in range(3):  # two layers, then the first of the variates
        plot.send_keys(Keys.ARROW_DOWN)
    assert "c, round 1: kept 0 numbers, sent 0 numbers" in browser.text("#live")
    assert f"received {size:,} numbers" in browser.text("#live")
    browser.find("#layers details summary").click()
    browser.until(lambda: "besides: c_i" in browser.text("#layers details"))


def test_the_final_adaptation_is_in_the_costs(browser: Browser, besides: tuple[str, int]) -> None:
    browser.open(besides[0])
    data = browser.run("Object.fromEntries(DATA.groups[0].methods.map((m) => [m.name, m]))".replace("DATA", PARSED))
    plain, tuned = data["fedavg"], data["fedavg+ft"]
    assert tuned["row"]["flops"] == plain["row"]["flops"]
    assert tuned["adapt_flops"] > plain["adapt_flops"] == 0
    star, end = browser.run(
        "['[d^=\"M0,-6.5\"]', 'path.mark'].map((mark) => document.querySelector("
        '`#flops [data-name="fedavg+ft"] ${mark}`).transform.baseVal[0].matrix.e)'
    )
    assert star > end + 1  # the star stands right of where training ended
    assert browser.run("document.querySelector('#uncounted').hidden")


def test_the_division_is_read_by_keyboard(browser: Browser, seeds: str) -> None:
    browser.open(seeds)
    plot = browser.find("#bubbles .plot")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert browser.text("#live") == "client 0: 0 20, 1 10"
    plot.send_keys(Keys.ARROW_RIGHT)
    assert browser.text("#live") == "client 1: 1 20, 2 11"
    plot.send_keys(Keys.END)
    assert browser.text("#live").startswith("client 8: ")
    assert not browser.run("document.querySelector('#tip').hidden")
    plot.send_keys(Keys.ESCAPE)
    assert browser.run("document.querySelector('#tip').hidden")


@pytest.mark.parametrize("width", [320, 390])
def test_the_leaderboard_fits_a_phone_and_can_be_had_whole(browser: Browser, seeds: str, width: int) -> None:
    browser.open(seeds, width=width)
    region = "document.querySelector('#board .scroll')"
    heads = "[...document.querySelectorAll('#board th[scope=col]')].filter((e) => e.offsetWidth).length"
    few = browser.run(heads)
    assert browser.run(f"{region}.scrollWidth - {region}.clientWidth") <= 1
    browser.find("#board .columns").click()
    assert browser.run(heads) > few >= 4
    assert browser.run(f"{region}.scrollWidth > {region}.clientWidth")
    assert browser.sideways() <= 0
    assert browser.run(f"[{region}.tabIndex, {region}.getAttribute('role')]") == [0, "region"]
    browser.screen(1300)
    assert not browser.run("document.querySelector('#board .columns').offsetWidth")


def test_explanations_scroll_within_themselves_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    run = made_up.run(tmp_path / "run", "fedrep", 3, 6, 0, 0.5)
    place = run / f"{FOLDER}3"
    place.mkdir()
    Image.new("RGB", (820, 300), "white").save(place / "maps.png")
    words = {"title": "Where the models look", "note": "maps", "alt": "a picture", "file": "maps.png"}
    (place / FILE).write_text(json.dumps({"title": "Client 3 explained", "pictures": [words]}))
    browser.open(write([run], tmp_path / "page.html").as_uri(), width=320)
    assert browser.sideways() <= 0
    assert browser.run("document.querySelector('.picture img').getBoundingClientRect().width") == 820
    box = "document.querySelector('.picture')"
    assert browser.run(f"[{box}.scrollWidth > {box}.clientWidth, {box}.tabIndex]") == [True, 0]
    assert "Where the models look" in browser.run(f"{box}.getAttribute('aria-label')")
    assert browser.findings() == []
    browser.screen(1300)
    assert browser.run(f"{box}.scrollWidth <= {box}.clientWidth")


def test_settings_have_titles_that_name_what_differs(browser: Browser, tmp_path: Path) -> None:
    for every in (1, 3):
        made_up.run(tmp_path / str(every), "fedrep", 6, 6, 0, 0.5, eval_every=every)
    browser.open(write([tmp_path / "1", tmp_path / "3"], tmp_path / "page.html").as_uri())
    first, second = browser.run("[...document.querySelectorAll('#settings option')].map((e) => e.textContent)")
    assert (first.endswith("eval_every = 1"), second.endswith("eval_every = 3")) == (True, True)
    assert browser.text("#what") == first


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_do_not_scroll_sideways(browser: Browser, page: str, width: int) -> None:
    browser.open(page, width=width)
    assert browser.sideways() <= 0
    assert not browser.run("document.querySelector('#methods details').open")
    browser.run("document.querySelector('#methods summary').click()")
    assert browser.sideways() <= 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_stands_in_the_way_of_anybody(browser: Browser, seeds: str, page: str, dark: bool) -> None:
    for address, width in ((seeds, 1300), (page, 1300), (seeds, 390)):
        browser.open(address, dark=dark, width=width)
        browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert browser.findings() == []


def test_seeds_make_bands_and_ranks(browser: Browser, seeds: str) -> None:
    browser.open(seeds)
    assert browser.count("#accuracy .band") == browser.count("#sorted .band") == 4
    assert browser.count("#board .whisker") == 4
    assert browser.count("#gain-choices select") == 2
    assert "±" in browser.text("#board tbody tr")


def test_it_prints_all_sections(browser: Browser, seeds: str) -> None:
    browser.open(seeds, dark=True)
    wanted = {"printBackground": True, "generateTaggedPDF": True, "generateDocumentOutline": True}
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", wanted)["data"])
    assert pdf.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 9
    heads = browser.run(
        "[...document.querySelectorAll('main h2')].filter((e) => e.offsetWidth).map((e) => e.innerText)"
    )
    assert len(heads) >= 7
    for head in heads:  # the outline has the headings that are on paper
        assert any(f"/Title ({text})".encode() in pdf for text in (head, re.sub(r"([()])", r"\\\1", head))), head


@pytest.mark.parametrize("width", [718, 740])
def test_nothing_is_cut_off_on_paper(browser: Browser, seeds: str, width: int) -> None:
    """As wide as A4 and Letter are within Chromium's margins."""
    browser.open(seeds, width=width, dark=True)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        boxes = browser.run(
            "[...document.querySelectorAll('svg.chart, table, img, .card, .tile, pre, h2')].map((e) =>"
            " [e.id || e.className.baseVal || e.className || e.tagName, e.getBoundingClientRect()])"
            ".filter(([, box]) => box.width).map(([name, box]) => [name, box.left, box.right, box.height])"
        )
        assert len(boxes) > 20
        assert [box for box in boxes if box[1] < -1 or box[2] > width + 1 or not box[3]] == []
        assert len([name for name, *_ in boxes if name == "chart"]) >= 8
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    bad = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    clients = [
        bad,
        "x" * 10_000,
        "\u202eклиент 顧客",
        "</script><script>hacked = 1</script>",
        "\u2028\ud800",
        "a&amp;b",
    ]
    classes = [bad, "y" * 10_000, *"cdefghij"]
    for seed, name in enumerate(["fedrep", "local", "fedavg"]):
        made_up.run(
            tmp_path / f"{name}{bad.replace('/', '')}"[:200],
            name,
            3,
            6,
            0,
            0.5 + seed / 10,
            names=clients,
            classes=classes,
            data=f"python:{bad}",
            shift="z" * 10_000,
        )
    page = write(sorted(tmp_path.iterdir()), tmp_path / "page.html")
    for width in (1300, 390):
        browser.open(page.as_uri(), width=width)
        assert browser.log() == []
        assert browser.run("window.hacked === undefined")
        assert browser.count("img") == 0
        assert browser.sideways() <= 0
        assert "<script>window.hacked" in browser.text("h1")
        assert "<script>" in browser.text("#confusion-choices option")
    assert "a&amp;b" in browser.text("#confusion-choices")


def test_a_large_comparison_is_small_and_quick(browser: Browser, tmp_path: Path) -> None:
    made_up.comparison(tmp_path / "runs", made_up.names(30), rounds=100, clients=100)
    page = write([tmp_path / "runs"], tmp_path / "page.html")
    assert page.stat().st_size < 5_000_000
    times = []
    for _ in range(3):
        browser.open(page.as_uri())
        times.append(int(browser.run("document.documentElement.dataset.drawn")))
        assert browser.count("#accuracy g.series") == 30
    assert min(times) < 2000, times


def test_marks_on_an_axis_have_labels_that_tell_them_apart(browser: Browser, page: str) -> None:
    browser.open(page)
    labels = browser.run(
        "[...document.querySelectorAll('svg.chart .axes')].map((axes) =>"
        " [...axes.querySelectorAll('text[text-anchor=end]')].map((t) => t.textContent))"
    )
    assert len(labels) >= len(LINES)
    assert all(len(set(marks)) == len(marks) > 1 for marks in labels)
    source = resources.files("perfed.report.web").joinpath("chart.js").read_text()
    body = source[source.index("function digits") : source.index("function lineChart")]
    marks = "[[0.98, 0.985], [0.975, 1], [0, 0.25], [0.1, 0.1001]]"
    found = browser.run(f"(() => {{ {body}; return {marks}.map((two) => digits(two, 100)); }})()")
    assert found == [1, 1, 0, 2]
