"""A notebook in JupyterLab, used through the browser: run cells, type into them, read what they show."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, Page, expect

LOADED, SLOW = 60_000, 240_000  # milliseconds
_RUNNING = "() => [...document.querySelectorAll('.jp-InputArea-prompt')].some(e => e.textContent.startsWith('[*]'))"
_BYTES = "async image => [...new Uint8Array(await (await fetch(image.src)).arrayBuffer())]"


class NotebookPage:
    """The open notebook. Cells are found by their ids, through the file: the page itself knows only their places."""

    def __init__(self, page: Page, file: Path, address: str):
        self.page, self.file = page, file
        page.set_default_timeout(20_000)
        self._open(lambda: page.goto(address.format(file.name) + "&reset"))

    def cell(self, cell_id: str) -> Locator:
        """The cell with this id in the file as it was last saved."""
        place = [cell.id for cell in self.saved().cells].index(cell_id)
        return self.page.locator(f'.jp-Cell[data-windowed-list-index="{place}"]')

    def saved(self) -> nbformat.NotebookNode:
        """The notebook's file. JupyterLab empties it before it writes, so it may take two attempts."""
        for _ in range(50):
            try:
                return nbformat.read(self.file, 4)
            except nbformat.reader.NotJSONError:
                self.page.wait_for_timeout(100)
        raise AssertionError(f"{self.file.name} stays unreadable")

    def run_all(self) -> None:
        """Run > Run All Cells, and waits until it is over."""
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(_RUNNING)
        self.wait_until_idle()

    def run(self, cell: Locator) -> str:
        """Runs one cell and gives the text of its outputs."""
        self.select(cell)
        before = cell.locator(".jp-InputArea-prompt").text_content()
        self.page.keyboard.press("Control+Enter")
        expect(cell.locator(".jp-InputArea-prompt")).not_to_have_text(before, timeout=LOADED)
        self.wait_until_idle()
        return "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())

    def select(self, cell: Locator) -> None:
        """Clicks beside the cell's text, so that keys are commands."""
        cell.scroll_into_view_if_needed()
        cell.locator(".jp-InputArea-prompt").click()

    def replace_line(self, cell: Locator, line: str, by: list[str]) -> None:
        """Types lines in the place of the one line that says `line`; the editor sees to the indentation."""
        cell.locator(".cm-line").filter(has_text=line).click()
        for key in ("End", "Shift+Home"):
            self.page.keyboard.press(key)
        self.page.keyboard.type("\n".join(by))

    def new_cell_below(self, cell: Locator, text: str) -> Locator:
        """Adds a code cell and types its text."""
        place = int(cell.get_attribute("data-windowed-list-index"))
        self.select(cell)
        self.page.keyboard.press("b")
        new = self.page.locator(f'.jp-Cell[data-windowed-list-index="{place + 1}"]')
        expect(new.locator(".cm-content")).to_have_text("")
        new.locator(".cm-content").click()
        self.page.keyboard.type(text)
        return new

    def menu(self, name: str, entry: str) -> None:
        """Chooses from the menu bar."""
        self.page.locator(f'.lm-MenuBar-itemLabel:text-is("{name}")').click()
        self.page.locator(f'.lm-Menu-itemLabel:text-is("{entry}")').click()

    def wait_until_idle(self) -> None:
        """Waits until no cell runs or waits to run."""
        self.page.wait_for_function(f"() => !({_RUNNING})()", timeout=SLOW)
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=SLOW)

    def wait_until_saved(self) -> None:
        """Waits until the file has what the page has: at the latest when the autosave comes."""
        for _ in range(LOADED // 500):
            self._settle_saving()
            if not self.page.locator(".lm-TabBar-tab.jp-mod-dirty").count():
                return
            self.page.wait_for_timeout(500)
        raise AssertionError("the page was not saved")

    def wait_until_all_ran(self) -> None:
        """Waits until every code cell in the file has run, or one has failed.

        The page alone cannot tell: it holds only the cells in view, and looks idle between one cell and the next.
        """
        for _ in range(SLOW // 1000):
            code = [cell for cell in self.saved().cells if cell.cell_type == "code" and cell.source]
            if errors(self.saved()) or all(cell.execution_count for cell in code):
                return
            self._settle_saving()
            self.page.keyboard.press("Control+s")
            self.page.wait_for_timeout(1000)
        raise AssertionError("not all cells have run")

    def _settle_saving(self) -> None:
        """Where the autosave and ours came at the same time, JupyterLab asks which of them counts: the page does."""
        overwrite = self.page.locator('.jp-Dialog:has-text("File Changed") .jp-mod-warn')
        if overwrite.count():
            overwrite.click()

    def reload(self) -> None:
        """Loads the page again, as after closing the browser."""
        self._open(self.page.reload)

    def restart_kernel(self) -> None:
        """Kernel > Restart Kernel, and says yes."""
        self.menu("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(self.page.locator(".jp-Dialog")).to_have_count(0)
        self.wait_until_idle()

    def picture(self, cell: Locator) -> str:
        """A digest of the pictures that a cell's output shows."""
        pictures = cell.locator(".jp-OutputArea-output img").all()
        return " ".join(sha256(bytes(picture.evaluate(_BYTES))).hexdigest() for picture in pictures)

    def expect_changed_picture(self, cell: Locator, before: str, control: str) -> str:
        """Waits until the cell shows another picture than the one before; gives its digest."""
        for _ in range(100):
            now = self.picture(cell)
            if now != before:
                return now
            self.page.wait_for_timeout(100)
        raise AssertionError(f"the picture is the same after a move of: {control}")

    def _open(self, load: Callable[[], object]) -> None:
        # the notebook looks idle before it has a kernel, and what it is told to run then is dropped without a word
        with self.page.expect_websocket(lambda socket: "/api/kernels/" in socket.url, timeout=LOADED):
            load()
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=LOADED)
        last = len(self.saved().cells) - 1
        self.page.wait_for_selector(f'.jp-Cell[data-windowed-list-index="{last}"]', state="attached", timeout=LOADED)


def errors(notebook: nbformat.NotebookNode) -> list[str]:
    """What the errors in a notebook's outputs say."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    plain = re.compile(r"\x1b\[[0-9;]*m")
    return [plain.sub("", "\n".join(o.traceback)) for o in outputs if o.output_type == "error"]
