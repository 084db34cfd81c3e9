"""Settings of Sphinx: the reference is made of the docstrings, the pages are Markdown, and every warning is an
error."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent.parent))
# Help texts are as wide as code on a page, whatever the terminal.
os.environ["COLUMNS"], os.environ["NO_COLOR"] = "80", "1"

import kvpool  # noqa: E402
from kvpool.__main__ import command_line  # noqa: E402

project, author, version, release = "kvpool", "the maintainers of kvpool", kvpool.__version__, kvpool.__version__
project_copyright = ""
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
]
autosummary_generate = False
exclude_patterns = ["_build"]
# Attributes of several classes have one name, such as ``blocks``: a list of attributes links to one of them.
suppress_warnings = ["ref.python"]
html_theme, html_title = "furo", f"kvpool {version}"
html_static_path, html_css_files = ["_static"], ["kvpool.css"]
# Both from Pygments, so that code can be read in the light and in the dark.
pygments_style, pygments_dark_style = "friendly", "monokai"
html_show_copyright, html_copy_source, html_show_sphinx = False, False, False
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
# Engines that a plug-in imports. Its page needs none of them.
autodoc_mock_imports = ["mlx", "mlx_lm", "xllamacpp"]
autodoc_typehints, autodoc_typehints_format = "signature", "short"
python_maximum_signature_line_length = 70
napoleon_google_docstring = False
napoleon_use_ivar, napoleon_attr_annotations = True, False
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]


def _sections(app: Any, what: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as napoleon wants them.

    Where a parameter is written as ``name : what it is``, without its type, napoleon takes what follows the colon for
    one. Prose behind the parameters gets a heading, since their section would not end without.
    """
    if what in ("attribute", "data", "property") and lines:
        # Napoleon takes the text before a colon in the first line for a type, unless the line ends there.
        summary, colon, rest = lines[0].partition(": ")
        lines[:1] = [summary + colon.rstrip(), rest] if colon else [summary]
    inside, before = False, ""
    converted: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""][: len(lines)], strict=True):
        heading = set(following) == {"-"}
        match = re.fullmatch(r"(\w[\w, ]*) : (.+)", line)
        if match and following.startswith("    ") and len(line) < 80 and not line.endswith("."):
            match = None  # a type, with the description below
        if heading:
            inside = line in ("Parameters", "Attributes")
        elif inside and not before and line and not (match or following.startswith(" ")):
            inside = False
            converted += ["Notes", "-----"]
        converted += [match[1], f"    {match[2]}"] if inside and match else [line]
        before = line
    lines[:] = converted


def _short(
    app: Any, what: str, name: str, object: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[Any, Any]:
    """Signatures in which an array of NumPy is named as in the source."""

    def named(text: str | None) -> str | None:
        return text and re.sub(
            r"~numpy\.ndarray\[tuple\[~typing\.Any, \.\.\.\], ~numpy\.dtype\[~\w+\.(\w+)\]\]", r"NDArray[\1]", text
        )

    return named(signature), named(returns)


def _is_field(app: Any, what: str, name: str, object: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples are in the signature, and have no docstring worth reading."""
    return True if str(getattr(object, "__doc__", "")).startswith("Alias for field") else None


def _summarized(app: Any, docname: str, source: list[str]) -> None:
    """Put a table of the names that a page of the reference documents in front of them."""
    names = re.findall(r"^\.\. auto(?:class|function|exception|data):: ([\w.]+)", source[0], re.MULTILINE)
    if not docname.startswith("reference/") or not names:
        return
    table = "\n".join(["```{eval-rst}", ".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names)])
    title, _, rest = source[0].partition("\n")
    source[0] = f"{title}\n\n{table}\n```\n{rest}"


class CommandHelp(SphinxDirective):
    """``command-help``: the help text of a command, as it prints it itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        help_text = io.StringIO()
        with redirect_stdout(help_text), suppress(SystemExit):
            command_line().parse_args([self.arguments[0], "--help"])
        text = help_text.getvalue()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _sections, priority=1)
    app.connect("autodoc-process-signature", _short)
    app.connect("autodoc-skip-member", _is_field)
    app.connect("source-read", _summarized)
    app.add_directive("command-help", CommandHelp)
