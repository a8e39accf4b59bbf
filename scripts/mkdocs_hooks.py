"""Links of docs/ to files elsewhere in the repository: the site gets a copy of each below source/."""

import pathlib
import re

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)")


def _linked(page):
    for found in _LINK.finditer(page):
        if (_ROOT / found.group(2)).is_file():
            yield found.group(2)


def on_files(files, config):
    names = {name for file in files.documentation_pages() for name in _linked(file.content_string)}
    for name in sorted(names):
        # As text: a page of its own would have links of its own.
        content = (_ROOT / name).read_bytes()
        files.append(File.generated(config, f"source/{name}.txt", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    def replace(found):
        name = found.group(2)
        return f"](source/{name}.txt" if (_ROOT / name).is_file() else found.group(0)

    return _LINK.sub(replace, markdown)
