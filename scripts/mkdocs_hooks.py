"""The version in the site's name, and links of docs/ to files elsewhere in the repository: the site
gets a copy of each below source/."""

import pathlib
import re

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[1]
_PARTS = ("MAJOR", "MINOR", "PATCH")
_LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)")


def _linked(page):
    for found in _LINK.finditer(page):
        if (_ROOT / found.group(2)).is_file():
            yield found.group(2)


def on_config(config):
    header = (_ROOT / "include/fusedmoe/version.h").read_text()
    parts = [re.search(rf"FUSEDMOE_VERSION_{part} (\d+)", header).group(1) for part in _PARTS]
    config.site_name += " " + ".".join(parts)
    return config


def on_files(files, config):
    names = {name for file in files.documentation_pages() for name in _linked(file.content_string)}
    for name in sorted(names):
        # As text: a page of its own would have links of its own.
        content = (_ROOT / name).read_bytes()
        files.append(File.generated(config, f"source/{name}.txt", content=content))
    # Doxygen writes it afterwards.
    files.append(File.generated(config, "cpp/index.html", content=""))
    return files


def on_page_markdown(markdown, page, config, files):
    def replace(found):
        name = found.group(2)
        return f"](source/{name}.txt" if (_ROOT / name).is_file() else found.group(0)

    return _LINK.sub(replace, markdown)


def on_page_content(html, page, config, files):
    """Answers of the support matrix get a colour, sources of the Python package their place."""
    html = html.replace("build/python/fusedmoe/", "python/fusedmoe/")
    for sign, name in (("\N{CHECK MARK}", "yes"), ("\N{BALLOT X}", "no")):
        html = html.replace(f"<td>{sign}", f'<td><span class="{name}">{sign}</span>')
    return html
