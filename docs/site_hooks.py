"""What `make docs` adds to mkdocs.

Files of the repository outside docs/ are a part of the site. A public name without a docstring is an error, and so is a
page that fetches something from the network.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "results/pictures/*",
    "results/plots/*",
    "results/records/*/*.png",
    "results/tables/*.md",
    "results/earlier/*.md",
    "results/earlier/*.svg",
)
log = logging.getLogger("mkdocs.plugins.site_hooks")  # a warning fails a strict build


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files `OUTSIDE`, at the same paths as in the repository."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Report undocumented names of the reference, and turn paths of the repository into paths of the site."""
    for name in undocumented(re.findall(r"^::: (\S+)", markdown, re.MULTILINE)):
        log.warning("%s on the page %s has no docstring or does not exist", name, page.file.src_uri)
    folder = posixpath.dirname(path_in_repository(page.file))

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        target = target.removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}"

    return re.sub(r"\]\((?!\w+:|#|/)([^)#\s]+)", on_site, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Report what a page fetches from the network."""
    for url in fetched(output):
        log.warning("the page %s fetches %s", page.file.src_uri, url)
    return output


def fetched(html: str) -> list[str]:
    """Addresses of scripts, styles and pictures that a browser would fetch from another server."""
    return re.findall(r'<(?:script|img|iframe|link rel="stylesheet")[^>]*(?:src|href)="((?:https?:)?//[^"]+)', html)


def path_in_repository(file: File) -> str:
    """The path of a page's source, such as docs/index.md."""
    return file.src_uri if file.generated_by else f"docs/{file.src_uri}"


def undocumented(names: list[str], root: Path = ROOT) -> list[str]:
    """The public names that have no docstring or do not exist, of classes and functions and of their public members."""
    found: list[str] = []
    for name in names:
        package, _, path = name.partition(".")
        try:
            found += _undocumented(_package(root, package)[path])
        except KeyError:
            found.append(name)
    return found


@cache
def _package(root: Path, name: str) -> griffe.Object:
    package = griffe.load(name, search_paths=[root], allow_inspection=False)
    assert isinstance(package, griffe.Object)
    return package


def _undocumented(thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    if not thing.has_docstring and not any(_is_documented_in(base, thing.name) for base in _bases(thing.parent)):
        yield thing.path
    if thing.is_class or thing.is_module:
        for member in thing.members.values():
            public = member.name == "__call__" or not member.name.startswith("_")
            if public and not member.is_alias and (member.is_class or member.is_function):
                yield from _undocumented(member)


def _bases(thing: griffe.Object | griffe.Alias | None) -> list[griffe.Class]:
    return thing.mro() if isinstance(thing, griffe.Class) else []


def _is_documented_in(base: griffe.Class, name: str) -> bool:
    return name in base.members and base.members[name].has_docstring
