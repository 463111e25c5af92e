"""Pictures of the service's page for the documentation: starts plsc-serve on a run of the glyphs recipe, and looks.

    python tools/screenshots.py runs/glyphs docs/images

Needs playwright and a Chromium (CHROMIUM=/path, else /usr/bin/chromium, else playwright's own).
"""

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from plsc.data import Glyphs
from plsc.serve import Client

SIZE = {"width": 1180, "height": 760}
VIEWS = {"light": ("search", "compare"), "dark": ("gallery", "service")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run of the glyphs recipe")
    parser.add_argument("out", help="folder of the pictures")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    known, unseen = characters("train"), characters("test")
    with tempfile.TemporaryDirectory() as scratch, Server(args.run, Path(scratch) / "gallery") as url:
        client = Client(url)
        for name, pictures in list(unseen.items())[5:400:11]:
            client.add(name, [pictures[0]])
        with sync_playwright() as playwright:
            binary = os.environ.get("CHROMIUM") or "/usr/bin/chromium"
            browser = playwright.chromium.launch(executable_path=binary if os.path.exists(binary) else None)
            files = Files(Path(scratch), known, unseen)
            for scheme, views in VIEWS.items():
                page = browser.new_page(viewport=SIZE, color_scheme=scheme, device_scale_factor=1.5)
                page.goto(url)
                for view in views:
                    page.get_by_role("tab", name=view.capitalize()).click()
                    SHOW[view](page, files, client)
                    settle(page)
                    page.screenshot(path=out / f"serve-{view}-{scheme}.png")
                page.close()
            browser.close()


def search(page: Page, files: "Files", client: Client) -> None:
    page.locator("#drop-search input").set_input_files(files.known)
    page.locator("#results li img").first.wait_for()


def compare(page: Page, files: "Files", client: Client) -> None:
    page.locator("#drop-first input").set_input_files(files.one)
    page.locator("#drop-second input").set_input_files(files.other)
    page.locator("#scale").wait_for()


def gallery(page: Page, files: "Files", client: Client) -> None:
    page.locator("#entries li img").first.wait_for()


def service(page: Page, files: "Files", client: Client) -> None:
    for number in range(60):
        client.embed([Path(files.one)] * (2 + abs(number % 12 - 6)))
        page.wait_for_timeout(500)


SHOW = {"search": search, "compare": compare, "gallery": gallery, "service": service}


def settle(page: Page) -> None:
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)


def characters(split: str) -> dict[str, list[bytes]]:
    """PNG files of the characters of the demo's training or held-out part, by name."""
    data = Glyphs(image_size=48, channels=1, split=split)
    labels = np.asarray(data.labels)
    found: dict[str, list[bytes]] = {}
    for label in range(0, 400):
        rows = np.flatnonzero(labels == label)
        found[data.class_names[label]] = [png(data[int(row)][0]) for row in rows[[0, len(rows) // 2]]]
    return found


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels[:, :, 0]).save(out, "PNG")
    return out.getvalue()


class Files:
    """Images as files, for the page's file choosers."""

    def __init__(self, folder: Path, known: dict[str, list[bytes]], unseen: dict[str, list[bytes]]) -> None:
        one, other = list(unseen.values())[60]
        for name, data in (("known", list(known.values())[130][1]), ("one", one), ("other", other)):
            (folder / f"{name}.png").write_bytes(data)
            setattr(self, name, str(folder / f"{name}.png"))


class Server:
    """plsc-serve as a process; as a context, its URL."""

    def __init__(self, run: str, gallery: Path) -> None:
        self.command = [sys.executable, "-m", "plsc.cli", "serve", run, "--port", "0", "--gallery", str(gallery)]

    def __enter__(self) -> str:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"serving at (\S+)", line):
                return found[1]
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        for _ in range(100):
            if self.process.poll() is not None:
                return
            time.sleep(0.1)
        self.process.kill()


if __name__ == "__main__":
    main()
