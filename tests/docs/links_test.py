"""Every link of a page leads to a file, and to a heading of it.

usage: links_test.py ROOT
"""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
pages = [*root.glob("*.md"), *root.glob("docs/*.md")]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Reference of the headers, which the site alone has.
MADE = "cpp/"
wrong = []
for page in pages:
    prose = re.sub(r"`[^`\n]*`", "", CODE.sub("", page.read_text()))
    for link, file, anchor in re.findall(r"\]\((?!\w+:)(([^)#\s]*)(?:#([^)\s]*))?)\)", prose):
        target = page.parent / file if file else page
        known = target.exists() and (not anchor or anchor in anchors(target))
        if not known and not file.startswith(MADE):
            wrong.append(f"{page.relative_to(root)}: {link}")
print("\n".join(wrong) or f"{len(pages)} pages")
sys.exit(bool(wrong))
