"""What every HTML page of ours is made with: templates of the stage, and pictures inside the page."""

import base64

from jinja2 import Environment, PackageLoader, StrictUndefined


def template_environment(package: str) -> Environment:
    """Templates of a package's `templates/`; text is escaped, and an unknown name is an error."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def data_uri(png: bytes) -> str:
    """A PNG as a data URI: the page needs no other file and no network."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
