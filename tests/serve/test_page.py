"""The page in a real browser: search, compare, gallery, by mouse, keyboard and paste; nothing from afar."""

import base64
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from .conftest import draw, encode
from .running import Running

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow
TOKEN = "correct horse battery"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if binary is None:
        pytest.skip("needs a chromium: apt install chromium, or CHROMIUM=/path")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=binary)
        yield found
        found.close()


@pytest.fixture(scope="module")
def server(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    gallery = tmp_path_factory.mktemp("page") / "gallery"
    with Running(bundle_path, "--gallery", str(gallery)) as running:
        yield running


@pytest.fixture
def problems() -> list[str]:
    """What went wrong in the page, and whom else it asked."""
    return []


@pytest.fixture
def page(browser: Any, server: Running, problems: list[str]) -> Iterator[Any]:
    """A fresh page; at its end nothing may have failed, and nothing may have been asked of anybody else."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    found = context.new_page()
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    found.on(
        "request", lambda one: None if one.url.startswith((server.url, "data:", "blob:")) else problems.append(one.url)
    )
    found.goto(server.url)
    found.get_by_text("30 classes").wait_for()
    yield found
    context.close()
    assert problems == []


def image(seed: int) -> dict[str, Any]:
    return {"name": f"{seed}.png", "mimeType": "image/png", "buffer": encode(draw(seed))}


def test_search_shows_the_nearest_classes(page: Any) -> None:
    page.locator("#drop-search input").set_input_files(image(28))
    first = page.locator("#results li").first
    first.get_by_text("1.000").wait_for()
    assert first.locator(".name").inner_text() == "<b>bold & co</b>"  # a name is text
    assert "above" in first.get_attribute("class") and page.locator("#results li").count() == 12
    assert "match" not in page.locator("#results").inner_text()  # one of many near ones is none yet
    said = page.locator("#worth").inner_text()
    assert "reaches 0.700, which 1 in 1,000 pairs" in said and "among 30 classes about 0.03 reach it by chance" in said
    first.locator("img").wait_for()
    page.locator("#count").select_option("30")
    page.locator("#results li").nth(29).wait_for()
    page.locator("#among").select_option("gallery")
    page.get_by_text("The gallery is empty.").wait_for()
    assert page.locator("#worth").inner_text() == ""


def test_pasting_and_dropping(page: Any) -> None:
    """As a browser does them: events that bring a file."""
    give = """([kind, selector, data]) => {
      const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
      const held = new DataTransfer();
      held.items.add(new File([bytes], "x.png", { type: "image/png" }));
      const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: held, bubbles: true })
        : new DragEvent("drop", { dataTransfer: held, bubbles: true, cancelable: true });
      document.querySelector(selector).dispatchEvent(event);
    }"""
    page.evaluate(give, ["paste", "body", base64.b64encode(encode(draw(2))).decode()])
    page.locator("#results li").first.get_by_text("Person 2").wait_for()
    page.evaluate(give, ["drop", "#drop-search", base64.b64encode(encode(draw(3))).decode()])
    page.locator("#results li").first.get_by_text("Person 3").wait_for()
    page.get_by_role("tab", name="Compare").click()
    for seed in (4, 4):  # pasted twice: one place after the other
        page.evaluate(give, ["paste", "body", base64.b64encode(encode(draw(seed))).decode()])
    page.get_by_text("The same").wait_for()


def test_compare_against_the_threshold(page: Any) -> None:
    page.get_by_role("tab", name="Compare").click()
    page.locator("#drop-first input").set_input_files(image(1))
    page.locator("#drop-second input").set_input_files(image(2))
    page.get_by_text("threshold 0.700").wait_for()
    page.locator("#far").select_option("0.01")
    page.get_by_text("threshold 0.500").wait_for()
    page.locator("#drop-second input").set_input_files(image(1))
    page.get_by_text("The same").wait_for()
    assert page.locator(".verdict").get_attribute("class") == "verdict card same"


def test_gallery_by_keyboard_alone(page: Any, server: Running) -> None:
    page.locator("#tab-search").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert (
        page.locator("#gallery").is_visible() and page.locator("#tab-gallery").get_attribute("aria-selected") == "true"
    )
    page.get_by_text("Nobody is in the gallery yet.").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement === document.querySelector('#drop-add input')")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(image(70))
    page.locator("#add-name").focus()
    page.keyboard.type("Ada <script>alert(1)</script>")
    page.keyboard.press("Enter")
    entry = page.locator("#entries li").first
    entry.get_by_text("Ada <script>").wait_for()
    entry.locator("img").wait_for()
    page.locator("#filter").fill("nobody")
    page.get_by_text("No name contains that.").wait_for()
    page.locator("#filter").fill("ada")
    entry.get_by_text("Ada <script>").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    entry.locator(".remove").focus()
    page.keyboard.press("Enter")
    page.get_by_text("No name contains that.").wait_for()


def test_what_goes_wrong_is_said(page: Any) -> None:
    page.locator("#drop-search input").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"})
    page.get_by_text("a.txt is not an image").wait_for()


BAD = {
    "text": {"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello"},
    "broken": {"name": "a.png", "mimeType": "image/png", "buffer": encode(draw(1))[:80]},
}
SAID = {"text": "a.txt is not an image", "broken": "image 0: broken or unknown image"}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_takes_old_results_along(page: Any, problems: list[str], kind: str) -> None:
    """What was found for one image is never shown beside another, or beside none; a good one is answered again."""
    page.locator("#drop-search input").set_input_files(image(3))
    page.locator("#results").get_by_text("Person 3").wait_for()
    page.locator("#drop-search input").set_input_files(BAD[kind])
    page.locator("#message").get_by_text(SAID[kind]).wait_for()
    page.locator("#results .empty").wait_for()
    assert page.locator("#results li").count() == 1
    assert page.locator("#search-time").inner_text() == page.locator("#worth").inner_text() == ""
    assert page.locator("#drop-search img").count() == (kind == "broken")  # the picture that was asked about
    page.locator("#drop-search input").set_input_files(image(4))
    page.locator("#results").get_by_text("Person 4").wait_for()
    assert page.locator("#message").is_hidden()

    page.get_by_role("tab", name="Compare").click()
    for place in ("first", "second"):
        page.locator(f"#drop-{place} input").set_input_files(image(1))
    page.get_by_text("The same").wait_for()
    page.locator("#drop-second input").set_input_files(BAD[kind])
    page.locator("#message").get_by_text(SAID[kind].replace("image 0", "image 1")).wait_for()
    page.locator("#verdict").get_by_text("Two images" if kind == "text" else "No result").wait_for()
    assert page.locator(".verdict").get_attribute("class") == "verdict card" and page.locator("#scale").is_hidden()
    page.locator("#drop-second input").set_input_files(image(1))
    page.get_by_text("The same").wait_for()

    page.get_by_role("tab", name="Gallery").click()
    page.locator("#drop-add input").set_input_files(image(1))
    assert page.locator("#add-button").is_enabled()
    page.locator("#drop-add input").set_input_files(BAD["text"])
    assert page.locator("#add-button").is_disabled()
    problems[:] = [one for one in problems if "422" not in one]  # the console's line of each refusal


def test_a_late_answer_is_of_no_newer_image(page: Any) -> None:
    """An image whose answer is slow, then a bad file: nothing of the first appears."""
    held: list[Any] = []
    page.route("**/v1/search*", lambda route: held.append(route))
    page.locator("#drop-search input").set_input_files(image(3))
    page.wait_for_timeout(200)
    page.locator("#drop-search input").set_input_files(BAD["text"])
    page.get_by_text("a.txt is not an image").wait_for()
    with page.expect_response("**/v1/search*"):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert page.locator("#results").inner_text() == "The nearest classes of an image appear here."
    assert page.get_by_text("a.txt is not an image").is_visible()


def test_what_shines_through_is_shown_as_the_network_sees_it(page: Any) -> None:
    """Black: a picture of the place, where the image is transparent."""
    clear = np.dstack([draw(3), np.zeros((112, 112), np.uint8)])
    page.locator("#drop-search input").set_input_files({**image(3), "buffer": encode(clear)})
    page.locator("#drop-search img").wait_for()
    shown = Image.open(io.BytesIO(page.locator("#drop-search").screenshot())).convert("RGB")
    assert shown.getpixel((shown.width // 2, shown.height // 2)) == (0, 0, 0)


def test_light_and_dark_and_a_narrow_screen(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light  # remembered
    page.set_viewport_size({"width": 380, "height": 800})
    for tab in ("Search", "Compare", "Gallery", "Service"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab


def test_throughput_is_shown(page: Any) -> None:
    page.get_by_role("tab", name="Service").click()
    page.get_by_text("Images a second", exact=True).wait_for()
    page.get_by_text("1 in 1,000").last.wait_for()


def test_every_control_has_a_name(page: Any) -> None:
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, a")]
      .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.closest("label")))
      .map((node) => node.outerHTML)""")
    assert unnamed == []


def test_the_page_asks_for_the_token(browser: Any, bundle_path: Path) -> None:
    with Running(bundle_path, token=TOKEN) as running:
        page = browser.new_page()
        page.goto(running.url)
        page.locator("#token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("30 classes").wait_for()
        assert page.get_by_role("link", name="metrics").count() == 0  # it would be answered 401
        page.locator("#drop-search input").set_input_files(image(9))
        page.locator("#results li").first.get_by_text("Person 9").wait_for()
        page.locator("#results li img").first.wait_for()
        page.close()
