"""Takes a picture of the web page of `gumiho demo`, with a browser that playwright drives.

python docs/pictures/photograph_page.py
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from transformers_gumiho.tools.presenting import DemoArguments, make_page


QUESTION = "Count from 1 to 20."
PICTURE = Path(__file__).parents[1] / "images" / "page.png"
# The speeds are those of one machine at one moment.
WITHOUT_SPEEDS = """
for (const counter of document.querySelectorAll(".gumiho-speed, .gumiho-seconds")) counter.parentElement.remove();
const verdict = document.querySelector(".gumiho-verdict");
verdict.textContent = verdict.textContent.replace(/ Speed-up .*/, "");
"""


def main() -> None:
    page = make_page(DemoArguments(pair="smollm2", dtype="float32"))
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    with sync_playwright() as playwright:
        found = shutil.which("chromium") or playwright.chromium.executable_path
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        tab = browser.new_page(viewport={"width": 1000, "height": 1200})
        tab.goto(url)
        tab.fill("#question textarea", QUESTION)
        tab.click("#ask")
        tab.wait_for_selector('[data-verdict="equal"]', timeout=300_000)
        tab.evaluate(WITHOUT_SPEEDS)
        tab.screenshot(path=PICTURE, full_page=True)
        browser.close()
    page.close()


if __name__ == "__main__":
    main()
