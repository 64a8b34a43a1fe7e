"""The page in a browser: light and dark, at two widths, without script errors or sideways
scrolling, with every picture.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--dump-dom", "--window-size=1700,900"),
]
WIDTHS = 420, 1200
ERRORS = (
    "<script>window.errors = []; addEventListener('error', e => errors.push(String(e.message)),"
    " true)</script>"
)
# Put behind the page: tells the page around it what a reader would meet.
PROBE = """<script>addEventListener("load", () => {
  const style = getComputedStyle(document.body), seen = e => e.getBoundingClientRect();
  const found = {inner: innerWidth, scroll: document.documentElement.scrollWidth, paper: style.backgroundColor,
    ink: style.color, errors: errors, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    slid: [...document.querySelectorAll(".wide")].filter(w => w.scrollWidth > w.clientWidth + 20).map(w => {
      w.scrollLeft = 20;
      const moved = [...w.querySelectorAll("tr > :first-child")].map(c => seen(c).left - seen(w).left);
      w.scrollLeft = 0; return Math.max(...moved.map(Math.abs)) }),
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).length,
    pictures: [...document.querySelectorAll("svg")].map(
      s => [seen(s).width, seen(s).height, s.querySelectorAll("path").length]),
    outside: [...document.querySelectorAll("main *")].filter(e => !e.closest(".wide") && seen(e).right > innerWidth + 1)
      .map(e => e.tagName)};
  const probe = parent.document.createElement("pre");
  probe.className = "probe"; probe.textContent = JSON.stringify(found); parent.document.body.append(probe);
})</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_and_shows_everything(report, tmp_path, dark):
    for width, found in look_at((report[1] / "index.html").read_text(), tmp_path, dark).items():
        assert found["errors"] == [] and found["broken"] == 0
        assert found["scroll"] <= width and found["outside"] == []
        assert all(moved < 1 for moved in found["slid"]) and (
            width > 420 or len(found["slid"]) > 2
        )  # names stay in sight
        assert len(found["pictures"]) == 10 and all(
            w > 250 and h > 100 and paths > 5 for w, h, paths in found["pictures"]
        )
        assert found["dark"] is dark
        paper, ink = (
            sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("paper", "ink")
        )
        assert (paper < 150 and ink > 600) if dark else (paper > 700 and ink < 150)


@pytest.mark.slow
def test_the_look_finds_what_is_wrong(tmp_path):
    body = (
        "<main><p style='width:900px'>wide</p><img"
        " src='file:///nowhere.png'></main><script>fail()</script>"
    )
    found = look_at(f"<!doctype html><body>{body}</body>", tmp_path, False)
    assert (
        found[420]["scroll"] > 420
        and found[420]["outside"] == ["P"]
        and found[1200]["outside"] == []
    )
    assert all(
        own["broken"] == 1 and any("fail" in error for error in own["errors"])
        for own in found.values()
    )


def look_at(page: str, folder, dark: bool) -> dict[int, dict]:
    """What a browser makes of a page, by width. In frames: a window is never narrower than 500."""
    probed = html.escape(ERRORS.join(re.split(r"(?<=<!doctype html>)", page, maxsplit=1)) + PROBE)
    frames = "".join(
        f'<iframe width="{width}" height="800" style="border:0" srcdoc="{probed}"></iframe>'
        for width in WIDTHS
    )
    around = (
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light'
        f' dark"><body>{frames}'
    )
    (folder / "around.html").write_text(around)
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [
        BROWSER,
        *FLAGS,
        scheme,
        f"--user-data-dir={folder}/profile",
        f"file://{folder}/around.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = [
        json.loads(html.unescape(text))
        for text in re.findall(r'<pre class="probe">(.*?)</pre>', done.stdout, re.S)
    ]
    found = {own["inner"]: own for own in told}
    assert tuple(sorted(found)) == WIDTHS
    return found
