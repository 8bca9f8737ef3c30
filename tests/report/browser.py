"""Open a page in Qt's browser without a screen, and print what it looks like there as JSON.

python -m tests.report.browser PAGE WIDTH [PNG]
"""

import json
import os
import sys

os.environ |= {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu"}

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

HEIGHT, TALLEST = 844, 16_000  # heights of the window and of the tallest picture, in pixels
WAIT = 8000  # milliseconds until a picture is taken of a window that has grown
# Details are opened so that their tables count.
MEASURE = """
document.querySelectorAll("details").forEach(details => details.open = true);
JSON.stringify({
  window: window.innerWidth,
  width: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  images: Array.from(document.images, image => image.complete ? image.naturalWidth : 0),
})
"""

CLOSE = """
document.querySelectorAll("details").forEach(details => details.open = false);
document.documentElement.scrollHeight
"""


class Page(QWebEnginePage):
    """A page that keeps what is written to its console."""

    def __init__(self, parent):
        super().__init__(parent)
        self.messages = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.messages.append(f"{source}:{line}: {message}")


def main(path, width, png=None):
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    view.resize(int(width), HEIGHT)
    view.show()

    def measured(text):
        found = json.loads(text) | {"console": page.messages}
        print(json.dumps(found))
        if png is None:
            app.quit()
            return
        page.runJavaScript(CLOSE, picture)

    def picture(height):
        view.resize(int(width), min(int(height), TALLEST))
        QTimer.singleShot(WAIT, lambda: (view.grab().save(png), app.quit()))

    def loaded(whole):
        if not whole:
            app.exit(1)
        page.runJavaScript(MEASURE, measured)

    page.loadFinished.connect(loaded)
    page.load(QUrl.fromLocalFile(path))
    sys.exit(app.exec())


if __name__ == "__main__":
    main(*sys.argv[1:])
