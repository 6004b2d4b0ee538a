"""Templates of self-contained pages."""

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """A template of this package: what is put in is escaped, what is missing is an error."""
    environment = Environment(
        loader=PackageLoader("perfmodel.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
